"""Putting any module under a recipe: which layers, which stay out, and what must not change."""

import copy

import pytest
import torch
from torch import nn

from narrowgauge.nn import Linear, convert
from narrowgauge.system.errors import UserError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.drop(x))))


class Model(nn.Module):
    """An embedding tied to the head, around blocks."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.short = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.short[0](x))


def make():
    torch.manual_seed(0)
    return Model()


def narrow(model):
    """Names of the layers whose GEMMs are narrow."""
    return {n for n, m in model.named_modules() if isinstance(m, Linear) and m.recipe.is_narrow}


IDS = torch.tensor([[1, 5, 9], [0, 2, 10]])
DOWN = {f"blocks.{i}.down" for i in range(4)}
LINEARS = {"head", "short.0", *DOWN, *(f"blocks.{i}.up" for i in range(4))}


def test_every_linear_is_converted_and_all_else_stays_as_it_was():
    model = make()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert convert(model, "mxfp8") is model
    assert {n for n, m in model.named_modules() if isinstance(m, Linear)} == LINEARS
    assert narrow(model) == LINEARS - {"head"}
    assert model.head.recipe.compute == "bf16"
    assert "bias=False, recipe=mxfp8, kept in bf16" in repr(model.head)
    model(IDS).sum().backward()
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[n] is p for n, p in parameters.items())
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.head.weight is model.embedding.weight, "tied weights stay tied"
    make().load_state_dict(model.state_dict())
    twin = copy.deepcopy(model.eval())
    assert torch.equal(model(IDS), twin(IDS))
    assert twin.head.weight is twin.embedding.weight


def test_what_stands_twice_in_a_model_is_converted_once():
    shared, block = nn.Linear(8, 8), Block()
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(8, 8))
    convert(model, "mxfp4")
    assert isinstance(model[0], Linear)
    assert model[0] is model[2]
    assert [m.index for m in model if isinstance(m, Linear)] == [0, 0, 1]
    assert narrow(model) == {"0", "3"}
    assert narrow(convert(model, "mxfp4", keep=["2"])) == {"3"}
    model = convert(nn.Sequential(block, block), "mxfp4")
    assert model[0] is model[1] is block
    assert isinstance(block.up, Linear)


@pytest.mark.parametrize("recipe", ["mxfp4", "msamp-o2"])
def test_a_layer_alone_is_converted_in_place(recipe):
    layer, seen = nn.Linear(32, 4).eval(), []
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    weight, bias = layer.weight, layer.bias
    convert(layer, "fp8")
    assert convert(layer, recipe) is layer
    assert type(layer) is Linear
    assert layer.weight is weight
    assert layer.bias is bias
    assert not layer.training
    assert layer.recipe.name == recipe
    layer(torch.ones(2, 32)).sum().backward()
    assert seen == ["forward"]


#: A name, a last component, a pattern, several.
KEEPS = {
    "down": DOWN,
    "blocks.2.*": {"blocks.2.up", "blocks.2.down"},
    "*": LINEARS,
    ("down", "short.0"): DOWN | {"short.0"},
}


@pytest.mark.parametrize("keep", KEEPS)
def test_keep_is_a_name_a_last_component_or_a_pattern(keep):
    everything = LINEARS - {"head"} - KEEPS[keep]
    assert narrow(convert(make(), "mxfp4", keep=keep if isinstance(keep, str) else list(keep))) == everything


class WithAdapter(nn.Linear):
    """A layer that computes more than its weight shows."""

    def __init__(self):
        super().__init__(8, 8)
        self.adapter = nn.Parameter(torch.zeros(8, 8))


def with_layer(other):
    return nn.Sequential(nn.Linear(8, 8), other)


#: A model, the arguments of `convert`, and what the error says.
MISTAKES = {
    "keep": (
        make,
        {"keep": ["up", "Down"]},
        r"^keep='Down' matches no linear layer; the nearest name is 'down'; use a whole name such as 'head'",
    ),
    "no layers": (lambda: nn.Embedding(3, 3), {}, r"no torch\.nn\.Linear in Embedding that a recipe could"),
    "computed weights": (
        lambda: with_layer(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
        {},
        r"the weight of 1 is not a parameter .* take the parametrization off",
    ),
    "adapter": (lambda: with_layer(WithAdapter()), {}, "layer '1' is a .* that also has 'adapter'"),
    "lazy": (lambda: with_layer(nn.LazyLinear(8)), {}, "layer '1' is a .* that has no values yet"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_before_anything_changes(mistake):
    make, arguments, words = MISTAKES[mistake]
    model = make()
    with pytest.raises(UserError, match=words):
        convert(model, **({"recipe": "fp8"} | arguments))
    assert not any(isinstance(m, Linear) for m in model.modules())
