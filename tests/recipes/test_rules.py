"""Rules: other casts in some layers, or from some time on."""

import pytest

from narrowgauge.quantization import make_cast
from narrowgauge.recipes import GEMM_PLACES, parse_recipe, recipe

LAYERS = [(f"blocks.{i}.{n}", i) for i in range(8) for n in ("qkv", "down")] + [("head", None)]
BF16 = make_cast("bf16")


def casts(text, name, place="fprop.x", step=1, steps=10, decay=8):
    """The name of a layer's cast in a step, by the definition: the last rule that selects and holds wins."""
    r = parse_recipe(text, "mine.toml").for_layer([(name, dict(LAYERS)[name])], 8)
    found = r.casts[place]
    for rule in r.rules:
        if rule.holds(step, steps, decay):
            found = rule.casts.get(place, found)
    return found.name


def selected(text):
    return {name for name, _ in LAYERS if casts(text, name) == "e4m3"}


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("", {name for name, _ in LAYERS}),
        ('modules = ["*.down"]', {f"blocks.{i}.down" for i in range(8)}),
        ('modules = ["qkv", "head"]', {"head", *(f"blocks.{i}.qkv" for i in range(8))}),
        ("first_blocks = 2", {name for name, block in LAYERS if block in (0, 1)}),
        ("first_blocks = 1", {"blocks.0.qkv", "blocks.0.down"}),
        ("last_blocks = 0.15", {name for name, block in LAYERS if block in (6, 7)}),
        ("last_blocks = 1.0", {name for name, block in LAYERS if block is not None}),
        ('first_blocks = 1\nmodules = ["head"]', {"blocks.0.qkv", "blocks.0.down", "head"}),
        ("first_blocks = 99", {name for name, block in LAYERS if block is not None}),
    ],
)
def test_which_layers(where, names):
    assert selected(f'[[rule]]\n{where}\nfprop = "e4m3"') == names


def test_one_operand_of_one_gemm():
    text = '[[rule]]\nmodules = ["down"]\nwgrad.dy = "e5m2"'
    assert casts(text, "blocks.3.down", "wgrad.dy") == "e5m2"
    assert {casts(text, "blocks.3.down", p) for p in GEMM_PLACES if p != "wgrad.dy"} == {"bf16"}


def test_later_rules_win_and_what_is_kept_is_kept():
    text = """
fprop = "mxfp4"
[keep]
modules = ["head"]
[[rule]]
modules = ["down"]
fprop = "mxfp8"
[[rule]]
first_blocks = 1
fprop = "mxfp6-e2m3"
"""
    assert casts(text, "blocks.3.qkv") == "mxfp4"
    assert casts(text, "blocks.3.down") == "mxfp8"
    assert casts(text, "blocks.0.down") == "mxfp6-e2m3"
    assert casts(text, "head") == "bf16"


@pytest.mark.parametrize(
    ("when", "wide"),
    [
        ("from_step = 4", range(4, 11)),
        ("from_share = 0.75", (8, 9, 10)),
        ("from_share = 0.7", (8, 9, 10)),
        ('from = "decay"', (8, 9, 10)),
        ("until_step = 4", (1, 2, 3)),
        ("until_share = 0.75", range(1, 8)),
        ('until = "decay"', range(1, 8)),
        ('from_step = 3\nuntil = "decay"', range(3, 8)),
        ('from = "decay"\nuntil_step = 10', (8, 9)),
        ("from_share = 0.2\nuntil_share = 0.5", (3, 4, 5)),
    ],
)
def test_from_when(when, wide):
    text = f'fprop = "mxfp4"\n[[rule]]\n{when}\nfprop = "bf16"'
    assert [s for s in range(1, 11) if casts(text, "head", step=s) == "bf16"] == list(wide)


def test_a_share_of_a_run_of_unknown_length_never_comes():
    text = 'fprop = "mxfp4"\n[[rule]]\nfrom_share = 0.5\nfprop = "bf16"'
    assert casts(text, "head", step=10**9, steps=None) == "mxfp4"


def test_a_schedule_that_never_falls_never_comes_to_its_decay():
    for when, cast in (("from", "mxfp4"), ("until", "bf16")):
        text = f'fprop = "mxfp4"\n[[rule]]\n{when} = "decay"\nfprop = "bf16"'
        assert casts(text, "head", step=10**9, decay=None) == cast


def test_a_rule_after_one_that_waits_wins_over_it_too():
    text = 'fprop = "mxfp4"\n[[rule]]\nfrom_step = 5\nfprop = "bf16"\n'
    text += '[[rule]]\nmodules = ["head"]\nfprop = "mxfp8"'
    assert [casts(text, "head", step=s) for s in (1, 9)] == ["mxfp8", "mxfp8"]
    assert [casts(text, "blocks.0.qkv", step=s) for s in (1, 9)] == ["mxfp4", "bf16"]


def test_a_layer_with_two_names_is_selected_by_either():
    r = parse_recipe('fprop = "mxfp4"\n[keep]\nmodules = ["lm_head"]', "mine.toml")
    assert r.for_layer([("embedding_out", None), ("lm_head", None)], 8).casts["fprop.x"] == BF16


def test_overrides_do_not_narrow_what_is_kept():
    r = recipe("fp8").with_places({"fprop.x": "mxfp4"})
    assert r.for_layer([("head", None)], 8).casts["fprop.x"] == BF16
    assert r.for_layer([("up", 0)], 8).casts["fprop.x"] == make_cast("mxfp4")


def test_a_gemm_is_both_of_its_operands():
    assert recipe("fp8").with_places({"wgrad": "bf16"}) == recipe("fp8").with_places(
        {"wgrad.dy": "bf16", "wgrad.x": "bf16"}
    )
