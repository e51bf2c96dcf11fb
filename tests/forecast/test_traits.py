"""Schemes and the traits of recipes, which are derived from the resolved places alone."""

import pytest

from narrowgauge.errors import UserError
from narrowgauge.forecast import scheme, scheme_names, traits
from narrowgauge.recipes import parse_recipe, recipe, recipe_names


def test_every_scheme_is_a_recipe_with_a_source():
    for name in scheme_names():
        one = scheme(name)
        assert one.recipe.name == name
        assert one.recipe.source
        assert one.recipe.title
        assert (one.recipe.is_narrow and not one.kin) or one.kin in recipe_names()
        assert name not in recipe_names()


def test_a_shipped_recipe_is_a_scheme_that_differs_in_nothing():
    assert scheme("mxfp4").recipe == recipe("mxfp4")
    assert not scheme("mxfp4").differs
    with pytest.raises(UserError, match="unknown recipe or scheme 'nvfp4-edn'; the nearest is 'nvfp4-eden'"):
        scheme("nvfp4-edn")


def test_the_share_of_narrow_operands():
    shares = {
        "bf16": ("none", 0),
        "mxfp4": ("both", 1),
        "nvfp4-forward": ("forward", 1 / 3),  # its backward GEMMs are wide, of rounded values
        "nvfp4-eden-backward": ("backward", 2 / 3),
        "nvfp4-eden-dgrad": ("backward", 1 / 3),
        "nvfp4-stochastic-gradient": ("backward", 1 / 6),
        "fp8-row-hp": ("both", 2 / 3),
    }
    for name, (direction, share) in shares.items():
        found = traits(scheme(name).recipe)
        assert (found.direction, found.narrow_share) == (direction, pytest.approx(share)), name


def test_traits_of_each_gemm():
    found = traits(recipe("nvfp4"), blocks=20)
    assert found.tail_share == 3 / 20
    assert found.narrow == dict.fromkeys(found.narrow, pytest.approx(0.85))
    assert found.hadamard == {"fprop": 0, "dgrad": 0, "wgrad": 16}
    assert found.rounding["dgrad.dy"] == "stochastic"
    assert found.rounding["fprop.x"] == "nearest"
    assert (found.block["fprop.x"], found.block["fprop.w"], found.bits["fprop.x"]) == (16, 256, 4)
    assert traits(recipe("nvfp4"), tail_share=0).narrow_share == 1
    assert traits(recipe("quartet2")).rounding["wgrad.x"] == "corrected"
    assert traits(recipe("quartet2")).reuses_forward
    assert not traits(recipe("mxfp4")).reuses_forward
    assert traits(recipe("nvfp4-finish")).timed
    assert not traits(recipe("nvfp4")).timed


def test_a_layer_that_a_rule_keeps_wide_counts_in_its_block():
    text = 'fprop = "mxfp4"\n[[rule]]\nmodules = ["*.down"]\nfprop = "bf16"\n'
    found = traits(parse_recipe(text, "own.toml"))
    assert found.tail_share == 0
    assert found.narrow["fprop"] == pytest.approx(3 / 4)
