"""The library's own models under a recipe: exact where nothing is narrowed, close and finite in FP8."""

from itertools import pairwise

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from narrowgauge.nn import Linear, convert
from narrowgauge.optim import AdamW
from narrowgauge.recipes import recipe, recipe_names
from nn.plain_recipes import PLAIN, waits

V, T = 67, 40
IDS = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(0))


def gpt2():
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=V, n_positions=64, n_embd=48, n_layer=3, n_head=4, **off)
    return GPT2LMHeadModel(config)


def llama():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, num_key_value_heads=2, **sizes))


def qwen2():
    """Biases in some projections, and a head that is tied to the embedding."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=V, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    return Qwen2ForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama, "qwen2": qwen2}


@pytest.fixture(params=MODELS)
def kind(request):
    return request.param


def make(kind):
    torch.manual_seed(0)
    return MODELS[kind]()


def outcome(model):
    """Logits, loss and gradients."""
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    return {"logits": out.logits.detach(), "loss": out.loss.detach()} | {
        n: p.grad.clone() for n, p in model.named_parameters()
    }


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


def test_fp32_is_the_model_itself_bit_for_bit(kind):
    expected, got = outcome(make(kind)), outcome(convert(make(kind), "fp32"))
    assert list(got) == list(expected)
    assert all(torch.equal(got[n], expected[n]) for n in expected)


@pytest.mark.parametrize(("name", "logits", "gradients"), [("bf16", 0.01, 0.03), ("fp8", 0.1, 0.25)])
def test_narrow_is_finite_and_close_but_not_the_same(kind, name, logits, gradients):
    expected, got = outcome(make(kind)), outcome(convert(make(kind), name))
    assert all(t.isfinite().all() for t in got.values())
    assert 1e-4 < distance(got["logits"], expected["logits"]) < logits
    assert abs(got["loss"] - expected["loss"]) < 0.02
    assert all(distance(got[n], expected[n]) < gradients for n in expected if n.endswith("weight"))


def test_which_layers(kind):
    model = convert(make(kind), "nvfp4")
    kept = {n for n, m in model.named_modules() if isinstance(m, Linear) and not m.recipe.is_narrow}
    list_name = "transformer.h" if kind == "gpt2" else "model.layers"
    assert "lm_head" in kept
    assert kept - {"lm_head"} == {
        n for n, m in model.named_modules() if isinstance(m, Linear) and n.startswith(f"{list_name}.2.")
    }
    converted = [m for m in model.modules() if isinstance(m, Linear)]
    assert len(converted) == 3 * (4 if kind == "gpt2" else 7) + 1
    assert all(m.spec.transposed == (kind == "gpt2") for m in converted if m is not model.lm_head)


def test_state_dict_goes_back_into_an_unconverted_model(kind):
    model, plain = convert(make(kind), "fp32"), make(kind)
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(IDS).logits, plain(IDS).logits)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_tied_heads_stay_tied(kind):
    model = convert(make(kind), "fp8")
    assert model.lm_head.weight is model.get_input_embeddings().weight


# Each recipe with one model, and each model with a third of the recipes.
PAIRS = [
    (kind, name)
    for i, kind in enumerate(MODELS)
    for j, name in enumerate(n for n in recipe_names() if not (waits(n) or recipe(n).narrows_attention))
    if (i + j) % 3 == 0
]


@pytest.mark.tier("thorough", keep=4)
@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_every_recipe_trains_every_model(kind, name):
    """With torch's own optimizer where it can be, and no `set_step`, as people do who only convert."""
    plain, model = make(kind), convert(make(kind), name)
    if name in PLAIN:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = AdamW(model.parameters(), name, lr=1e-3)
    losses = []
    for _ in range(5):
        loss = model(input_ids=IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(after < before for before, after in pairwise(losses)), losses
    assert losses[-1] < losses[0] - 0.3, losses
    shapes = {key: value.shape for key, value in plain.state_dict().items()}
    assert {key: value.shape for key, value in model.state_dict().items()} == shapes
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():  # what was learnt in low precision is in the weights
        assert plain(input_ids=IDS, labels=IDS).loss < losses[-1] + 0.02


def test_converting_again_takes_the_new_recipe(kind):
    again = outcome(convert(convert(make(kind), "fp8"), "mxfp4"))
    fresh = outcome(convert(make(kind), "mxfp4"))
    assert all(torch.equal(again[n], fresh[n]) for n in fresh)
    plain = outcome(make(kind))
    for name in ("mxfp4", "coat"):
        back = outcome(convert(convert(make(kind), name), recipe("fp32")))
        assert all(torch.equal(back[n], plain[n]) for n in plain)


@pytest.mark.parametrize("name", ["msamp-o2", "msamp-o3", "bf16-sr"])
def test_converting_narrow_weights_again_starts_from_their_numbers(name):
    model = convert(make("llama"), name)
    expected = outcome(convert(make("llama"), "fp32"))
    back = outcome(convert(model, "fp32"))
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    tolerance = 0.01 if name == "bf16-sr" else 0.001
    assert distance(back["logits"], expected["logits"]) < tolerance
