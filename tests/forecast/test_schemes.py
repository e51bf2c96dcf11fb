"""Schemes, and what the law reads from a recipe."""

import pytest

from narrowgauge.forecast import described, scheme, scheme_names, tail_share
from narrowgauge.recipes import parse_recipe, recipe, recipe_names
from narrowgauge.system.errors import UserError


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


def test_the_narrow_gemms_of_a_recipe_are_its_parts():
    gemms = {
        "bf16": [],
        "mxfp4": ["fprop", "dgrad", "wgrad"],
        "nvfp4-forward": ["fprop"],  # its backward GEMMs are wide, of rounded values
        "nvfp4-eden-backward": ["dgrad", "wgrad"],
        "nvfp4-eden-dgrad": ["dgrad"],
        "fp8-row-hp": ["fprop", "dgrad"],
    }
    for name, expected in gemms.items():
        assert [part.gemm for part in described(scheme(name).recipe).parts] == expected, name


def test_the_tail_is_the_blocks_that_stay_wide():
    assert tail_share(recipe("nvfp4"), blocks=20) == 3 / 20
    assert tail_share(recipe("mxfp4")) == 0
    text = 'fprop = "mxfp4"\n[[rule]]\nmodules = ["*.down"]\nfprop = "bf16"\n'
    assert tail_share(parse_recipe(text, "own.toml")) == 0, (
        "a layer that a rule keeps wide counts in its block"
    )
