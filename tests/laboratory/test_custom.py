"""Custom formats, casts and recipes: what is registered works wherever a shipped one does, or is refused."""

import re

import pytest
import torch

import narrowgauge as ng
from narrowgauge.exchange import TARGETS, write_recipe
from narrowgauge.formats import Format, Specials, decode, encode, format_names
from narrowgauge.quantization import cast
from narrowgauge.system.errors import UserError

E3M4 = Format("e3m4", 3, 4, 3, Specials.IEEE)
TABLE = {"element": "e3m4", "block": 32, "scale": "e8m0"}
X = torch.linspace(-4, 4, 64 * 64).reshape(64, 64)


def nearest_eighth(x):
    return (x * 8).round() / 8


def test_a_registered_format_quantizes_as_an_oracle_over_all_its_codes_does():
    fmt = ng.register_format(E3M4)
    assert "e3m4" in format_names()
    q = ng.quantize(X, TABLE)
    codes = torch.arange(256, dtype=torch.uint8)
    grid = decode(codes, fmt)
    grid = grid[grid.isfinite()].unique()
    blocks = (X.unflatten(1, (2, 32)) / q.scales.unsqueeze(-1)).flatten(1)
    nearest = grid[(blocks.unsqueeze(-1) - grid).abs().argmin(-1)]
    distance = (blocks - q.dequantize().div(q.scales.repeat_interleave(32, 1))).abs()
    assert torch.allclose(distance, (blocks - nearest).abs(), atol=1e-6)
    finite = decode(codes, fmt).isfinite()
    assert torch.equal(encode(decode(codes[finite], fmt), fmt), codes[finite])


def test_a_format_stands_where_a_cast_goes_registered_or_not():
    assert ng.quantize(X, Format("e2m2", 2, 2, 1, Specials.NONE)).packed().shape == (64, 40)
    assert ng.quantize(X, ng.format("e4m3")).cast == cast("e4m3")
    facts = Format("e3m4", 3, 4, 3, Specials.IEEE, source="b")
    assert ng.register_format(E3M4) is ng.register_format(facts), "the same facts again change nothing"


@pytest.mark.parametrize(
    ("fmt", "sentence"),
    [
        (Format("e4m3", 4, 3, 8, Specials.NONE), "has this name and other facts"),
        (Format("E3M4", 3, 4, 3, Specials.IEEE), "a name is small letters"),
        (Format("nvfp4", 2, 1, 1, Specials.NONE), "belongs to formats that ship"),
        (Format("e6m6", 6, 6, 31, Specials.IEEE), "from 2 to 8, because a code is stored in a byte"),
        (Format("far", 4, 3, 200, Specials.NONE), "float32, in which casts compute, has to hold them"),
    ],
)
def test_a_format_that_could_not_be_stored_is_refused(fmt, sentence):
    with pytest.raises(UserError, match=sentence):
        ng.register_format(fmt)


def test_a_recipe_from_a_dictionary_is_that_of_the_same_file(tmp_path):
    table = {"name": "mine", "fprop": "mxfp4", "wgrad.dy": "bf16", "keep": {"modules": ["head"]}}
    made = ng.Recipe.from_dict(table)
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nfprop = "mxfp4"\nwgrad.dy = "bf16"\n[keep]\nmodules = ["head"]\n')
    read = ng.load_recipe(file)
    assert (made.casts, made.rules, made.name) == (read.casts, read.rules, read.name)
    assert ng.Recipe.from_toml(made.text, "mine") == made
    assert ng.recipe(table) == made == ng.recipe(made)


def test_the_text_of_a_recipe_carries_the_facts_of_a_custom_format(monkeypatch):
    ng.register_format(E3M4)
    made = ng.recipe({"fprop": TABLE, "dgrad.dy": E3M4})
    monkeypatch.delitem(ng.formats.table._FORMATS, "e3m4")
    with pytest.raises(UserError, match="unknown format 'e3m4'"):
        ng.format("e3m4")
    assert ng.Recipe.from_toml(made.text, "own") == made
    assert ng.format("e3m4") == E3M4


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"fprop": object()}, "a value is text, a number"),
        ({"fprop": "mxfp4", "fprop.x": "bf16"}, "give fprop one value or a table"),
        ([("fprop", "mxfp4")], "from_dict takes a dictionary"),
        ({"format": {"e3m4": {"exponent_bits": 3}}}, "has no bias"),
        ({"fprop": {"element": "e3m4"}}, "unknown format 'e3m4'"),
    ],
)
def test_a_mistake_in_a_dictionary_is_answered_in_a_sentence(table, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        ng.Recipe.from_dict(table)


def test_a_cast_that_is_a_function_gives_the_operands_of_a_layer():
    """It sees the contracted axis last."""
    shapes = []
    ng.register_cast("mine", nearest_eighth)
    ng.register_cast("seen", lambda x: shapes.append(tuple(x.shape)) or x.clone())
    model = torch.nn.Sequential(torch.nn.Linear(64, 16, bias=False))
    weight = model[0].weight.detach().clone()
    ng.convert(model, {"compute": "fp32", "fprop": "mine"})
    assert torch.equal(model(X), nearest_eighth(X) @ nearest_eighth(weight).T)
    ng.convert(model, {"compute": "fp32", "wgrad": "mine"})
    model(X).sum().backward()
    assert torch.allclose(model[0].weight.grad, torch.ones(16, 64) @ nearest_eighth(X))
    ng.convert(model, dict.fromkeys(("fprop", "dgrad", "wgrad"), "seen"))
    shapes.clear()
    model(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert sorted(shapes) == sorted([(8, 64), (16, 64), (8, 16), (64, 16), (16, 8), (64, 8)])


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda x: x + torch.randn_like(x), "other values for the same tensor"),
        (torch.nan_to_num, "makes a finite number of NaN"),
        (lambda x: x.double(), "return the same shape and dtype"),
        (lambda x: x[:1], "return the same shape and dtype"),
        (lambda x: x.mul_(2), "changes its argument"),
        (lambda x: 1.0, "returns float, and a tensor is needed"),
    ],
)
def test_a_function_that_would_break_a_run_is_refused(function, sentence):
    with pytest.raises(UserError, match=sentence):
        ng.register_cast("broken", function)


def test_a_name_that_ships_is_not_given_away_and_places_that_store_codes_refuse_a_function():
    for name in ("mxfp4", "e4m3", "e2m3", "coat", "Mine"):
        with pytest.raises(UserError, match=r"take another|small letters"):
            ng.register_cast(name, nearest_eighth)
    ng.register_cast("mine", nearest_eighth)
    for place in ("m", "weight", "saved", "stream", "attention", "gather", "reduce"):
        with pytest.raises(UserError, match=r"function|mine"):
            ng.recipe({place: "mine"})


def test_what_would_ignore_a_function_refuses_it():
    ng.register_cast("mine", nearest_eighth)
    made = ng.recipe({"fprop": "mine"})
    with pytest.raises(UserError, match="gives values and no codes"):
        ng.quantize(X, "mine")
    with pytest.raises(UserError, match="cannot run natively here"):
        ng.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), made, backend="native")
    for target in TARGETS:
        with pytest.raises(UserError, match="a custom function"):
            write_recipe(made, target)
    forecast = ng.predict(made, 1e9, 2e10)[0]
    assert forecast.refused is not None
    assert "custom functions" in forecast.refused
