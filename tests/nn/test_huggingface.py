"""Models of transformers under a recipe: exact where nothing is narrowed, close and finite in FP8; and their
stacked experts, each of which is what a linear layer of its slice would be."""

import copy

import pytest
import torch
import transformers

from narrowgauge.nn import Linear, convert
from narrowgauge.nn.linear import accumulating
from narrowgauge.optim import AdamW
from narrowgauge.quantization import gradient_of
from narrowgauge.system.errors import UserError

V, D, E = 67, 64, 4
IDS = torch.randint(V, (2, 40), generator=torch.Generator().manual_seed(0))
MIXED = {"hidden_size": D, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
MIXED |= {"vocab_size": V, "num_key_value_heads": 2, "num_local_experts": E}
GPT2 = {"vocab_size": V, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4}
GPT2 |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
#: gpt-oss stores weights the other way round, with biases and a custom activation.
MODELS = {
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT2),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig, MIXED),
    "gpt-oss": (
        transformers.GptOssForCausalLM,
        transformers.GptOssConfig,
        MIXED | {"head_dim": 16, "layer_types": ["full_attention"] * 2},
    ),
}


def make(kind):
    torch.manual_seed(0)
    model, config, sizes = MODELS[kind]
    return model(config(**sizes))


def outcome(model):
    """Logits, loss and gradients."""
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    found = {"logits": out.logits.detach(), "loss": out.loss.detach()}
    return found | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(found, expected):
    return list(found) == list(expected) and all(torch.equal(found[n], t) for n, t in expected.items())


@pytest.mark.parametrize("kind", MODELS)
def test_fp32_is_the_model_itself(kind):
    expected, got = outcome(make(kind)), outcome(convert(make(kind), "fp32"))
    if kind == "gpt2":
        assert same(got, expected)
    else:  # torch sums over the tokens of all experts in another order
        for name, t in expected.items():
            torch.testing.assert_close(got[name], t, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("under", ["fp8", "msamp-o2"])
def test_a_conv1d_is_a_linear_layer_that_stores_its_weight_the_other_way(under):
    conv, plain = transformers.pytorch_utils.Conv1D(64, 96), torch.nn.Linear(96, 64)
    plain.load_state_dict({"weight": conv.weight.T, "bias": conv.bias})
    a, b = (convert(torch.nn.Sequential(layer), under, keep=[]) for layer in (conv, plain))
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    with accumulating(a, keeps_codes=False):
        for _ in range(2):
            a(x).square().sum().backward()
            b(x).square().sum().backward()
    assert torch.equal(a(x), b(x))
    gradient, expected = gradient_of(a[0].weight).T, gradient_of(b[0].weight)
    assert torch.equal(gradient, expected) == (under == "fp8")
    assert (gradient - expected).norm() < 0.1 * expected.norm(), "other random bits"


def first_experts(model):
    return model.model.layers[0].mlp.experts


def by_hand(plain, under, x, chosen, weights):
    """The experts of a plain module: a loop over linear layers, each under the recipe by itself."""
    y = torch.zeros_like(x)
    for e in range(E):
        layers = []
        for name in ("gate_up_proj", "down_proj"):
            w = getattr(plain, name)[e].detach()
            w_NK = w.T if plain.is_transposed else w
            layer = torch.nn.Linear(w_NK.shape[1], w_NK.shape[0], bias=plain.has_bias)
            layer.weight.data.copy_(w_NK)
            if plain.has_bias:
                layer.bias.data.copy_(getattr(plain, f"{name}_bias")[e])
            layers.append(convert(torch.nn.Sequential(layer), under))
        tokens = (chosen[:, 0] == e).nonzero().flatten()
        y[tokens] += layers[1](plain._apply_gate(layers[0](x[tokens]))) * weights[tokens, :1]
    return y


@pytest.mark.parametrize("under", ["mxfp4", "fp8-row"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
def test_each_expert_computes_as_a_linear_layer_of_its_slice(kind, under):
    """One expert a token, so that an expert has the loop's blocks and rows."""
    model = make(kind)
    plain, called = copy.deepcopy(first_experts(model)), []
    first_experts(model).register_forward_hook(lambda *_: called.append(1))
    experts, g = first_experts(convert(model, under)), torch.Generator().manual_seed(1)
    x, chosen = torch.randn(50, D, generator=g), torch.randint(E, (50, 1), generator=g)
    weights = torch.rand(50, 1, generator=g)
    with torch.no_grad():
        assert torch.equal(experts(x, chosen, weights), by_hand(plain, under, x, chosen, weights))
    assert called, "hooks stay"


def test_copies_recomputation_and_both_state_dicts_give_the_same_random_bits():
    """The weights of experts are one parameter, with which no layer multiplies as a whole."""
    m, recomputed, other = (convert(make("mixtral"), "nvfp4").train() for _ in range(3))
    old_name = recomputed.gradient_checkpointing_enable  # of older releases
    getattr(recomputed, "activation_checkpointing_enable", old_name)({"use_reentrant": False})
    twin = copy.deepcopy(m)
    expected = outcome(m)
    assert same(outcome(twin), expected)
    assert same(outcome(recomputed), expected)
    optimizer, its_optimizer = (AdamW(each.parameters(), "nvfp4", lr=1e-3) for each in (m, other))
    optimizer.step()
    saved = copy.deepcopy([m.state_dict(), optimizer.state_dict()])
    other.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    assert same(outcome(other), outcome(m))


def test_a_recipe_with_state_in_casts_is_refused_before_anything_changes():
    model = make("mixtral")
    with pytest.raises(UserError, match="stacked in one parameter for all experts; take a recipe"):
        convert(model, "msamp-o2")
    assert type(first_experts(model)).__name__ == "MixtralExperts"
    assert not any(isinstance(m, Linear) for m in model.modules())
