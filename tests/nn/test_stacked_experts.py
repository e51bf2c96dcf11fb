"""Experts of transformers' own mixtures under a recipe: each is what a linear layer of its slice would be."""

import copy

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM

from narrowgauge.errors import UserError
from narrowgauge.nn import Linear, convert, recipe_tensors
from narrowgauge.optim import AdamW

V, D, F, E = 67, 64, 96, 4
IDS = torch.randint(V, (2, 40), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": E,
}


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES))


def gpt_oss():
    """Weights stored the other way round, biases, a custom activation."""
    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=16, layer_types=["full_attention"] * 2))


MODELS = {"mixtral": mixtral, "gpt-oss": gpt_oss}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


def outcome(model):
    """The loss, and the gradients by name."""
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def first_experts(model):
    return model.model.layers[0].mlp.experts


def by_hand(plain, recipe, x, chosen, weights):
    """The experts of a plain module: a loop over linear layers, each under the recipe by itself."""
    y = torch.zeros_like(x)
    up, down = plain.gate_up_proj.detach(), plain.down_proj.detach()
    for e in range(E):
        layers = []
        for weight, bias in ((up[e], "gate_up_proj_bias"), (down[e], "down_proj_bias")):
            w_NK = weight.T if plain.is_transposed else weight
            layer = torch.nn.Linear(w_NK.shape[1], w_NK.shape[0], bias=plain.has_bias)
            layer.weight.data.copy_(w_NK)
            if plain.has_bias:
                layer.bias.data.copy_(getattr(plain, bias)[e])
            layers.append(convert(torch.nn.Sequential(layer), recipe))
        for a in range(chosen.shape[1]):
            tokens = (chosen[:, a] == e).nonzero().flatten()
            _add(
                y,
                tokens,
                weights[:, a],
                lambda t, layers=layers: layers[1](plain._apply_gate(layers[0](t))),
                x,
            )
    return y


def _add(y, tokens, weights, expert, x):
    if len(tokens):
        y[tokens] += expert(x[tokens]) * weights[tokens, None]


@pytest.mark.tier("thorough", keep=("mxfp4",))
@pytest.mark.parametrize("recipe", ["mxfp4", "fp8-row"])
def test_each_expert_computes_as_a_linear_layer_of_its_slice(model, recipe):
    """One expert a token, so that an expert has the loop's blocks and rows."""
    plain = copy.deepcopy(first_experts(model))
    experts = first_experts(convert(model, recipe))
    x = torch.randn(50, D, generator=torch.Generator().manual_seed(1))
    chosen = torch.randint(E, (50, 1), generator=torch.Generator().manual_seed(2))
    weights = torch.rand(50, 1, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(experts(x, chosen, weights), by_hand(plain, recipe, x, chosen, weights))


def test_under_fp32_a_model_computes_what_it_did(model):
    loss, gradients = outcome(copy.deepcopy(model))
    found, others = outcome(convert(model, "fp32"))
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6)


def test_names_weights_and_copies_stay(model):
    state, parameters = {k: v.clone() for k, v in model.state_dict().items()}, list(model.parameters())
    convert(model, "nvfp4", keep="*.experts.2.down_proj")
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(state)
    names = {n: m.recipe for n, m in model.named_modules() if isinstance(m, Linear) and ".experts." in n}
    assert len(names) == 2 * 2 * E
    wide = {n for n, r in names.items() if not r.is_narrow}
    assert {"model.layers.0.mlp.experts.2.down_proj", "model.layers.1.mlp.experts.2.down_proj"} <= wide
    other = copy.deepcopy(model)
    loss, gradients = outcome(model)
    again, others = outcome(other)
    assert torch.equal(loss, again)
    assert all(torch.equal(others[name], g) for name, g in gradients.items())
    with torch.no_grad():
        first_experts(other).down_proj.zero_()
    other.load_state_dict(state)
    assert torch.equal(outcome(convert(other, "fp32"))[0], outcome(convert(model, "fp32"))[0])


@pytest.mark.parametrize("recipe", ["fp8-delayed", "coat"])
def test_it_trains(recipe):
    """Each expert has separate delayed scales; moments in FP8 take stacked matrices as well."""
    model = convert(mixtral(), recipe)
    optimizer = AdamW(model.parameters(), recipe=recipe, lr=1e-3)
    losses = []
    for _ in range(3):
        losses.append(outcome(model)[0])
        optimizer.step()
    assert losses[2] < losses[0]
    seen = {k: t for k, t in recipe_tensors(model).items() if ".experts.1.down_proj." in k}
    assert len(seen) == 2 * len(recipe_tensors(convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), recipe)))
    assert any(t.count_nonzero() for t in seen.values()) == (recipe == "fp8-delayed")


@pytest.mark.parametrize("recipe", ["mxfp4", "fp8-delayed"])
def test_without_tokens_there_are_zeros_and_gradients_of_zero(model, recipe):
    """A process may have none, where a batch is divided."""
    experts = first_experts(convert(model, recipe))
    x = torch.zeros(0, D, requires_grad=True)
    y = experts(x, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert y.shape == (0, D)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in experts.parameters())


def test_hooks_of_experts_and_their_layers_are_called_after_conversion(model):
    seen = []
    experts = first_experts(model)
    handle = experts.register_forward_hook(lambda *_: seen.append("experts"))
    experts = first_experts(convert(model, "mxfp8"))
    layer = experts.get_submodule("1.down_proj")
    layer.register_forward_hook(lambda *_: seen.append("layer"))
    convert(model, "mxfp4")
    x, chosen = torch.ones(3, D), torch.ones(3, 1, dtype=torch.int64)
    experts(x, chosen, torch.ones(3, 1))
    assert seen == ["layer", "experts"]
    handle.remove()
    experts(x, chosen, torch.ones(3, 1))
    assert seen == ["layer", "experts", "layer"]


def test_recomputed_experts_see_the_same_random_bits():
    plain, recomputed = convert(mixtral(), "nvfp4").train(), convert(mixtral(), "nvfp4").train()
    old_name = recomputed.gradient_checkpointing_enable  # of older releases
    getattr(recomputed, "activation_checkpointing_enable", old_name)({"use_reentrant": False})
    (loss, gradients), (again, others) = outcome(plain), outcome(recomputed)
    assert torch.equal(loss, again)
    assert all(torch.equal(others[name], g) for name, g in gradients.items())


def test_a_recipe_with_state_in_casts_is_refused_before_anything_changes():
    model = mixtral()
    with pytest.raises(UserError, match="stacked in one parameter for all experts; take a recipe"):
        convert(model, "msamp-o2")
    assert type(first_experts(model)).__name__ == "MixtralExperts"
    assert not any(isinstance(m, Linear) for m in model.modules())


@pytest.mark.tier("thorough")  # short: optim/test_carried_state.py
def test_both_state_dicts_carry_the_state_of_experts():
    """Their weights are one parameter, with which no layer multiplies as a whole."""
    m, other = (convert(mixtral(), "nvfp4") for _ in range(2))
    optimizer, its_optimizer = (AdamW(each.parameters(), "nvfp4", lr=1e-3) for each in (m, other))
    outcome(m)
    optimizer.step()
    saved = copy.deepcopy([m.state_dict(), optimizer.state_dict()])
    other.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    assert torch.equal(outcome(other)[0], outcome(m)[0])
