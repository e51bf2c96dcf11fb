"""The places on the wire: what ships, what fits, and a sentence for what does not."""

import pytest

from narrowgauge.errors import UserError
from narrowgauge.quantization import make_cast
from narrowgauge.recipes import parse_recipe, recipe, recipe_names
from narrowgauge.training.config.config import make_config
from narrowgauge.training.config.diff import trajectory

GATHERED = {
    "bf16": "bf16",
    "bf16-sr": "bf16",
    "fp16": "fp16",
    "fp8": "e4m3",
    "fp8-attention": "e4m3",
    "fp8-fnuz": "e4m3fnuz",
    "coat": "e4m3",
    "msamp-o1": "fp16-scaled",
    "msamp-o2": "fp16-scaled",
    "msamp-o3": "e4m3",
}


@pytest.mark.parametrize("name", recipe_names())
def test_what_ships(name):
    r = recipe(name)
    assert r.gather.name == GATHERED.get(name, "fp32")
    powers = {"cast": "e4m3", "power_of_two": True, "prescale": True}
    assert r.reduce == make_cast(powers if name.startswith("msamp") else "fp32")


def test_by_override_and_by_file():
    r = recipe("fp8").with_places({"reduce": "bf16", "gather": "fp32"})
    assert (r.reduce.name, r.gather.name) == ("bf16", "fp32")
    assert (
        parse_recipe('fprop = "e4m3"\ndgrad = "e4m3"\ngather = "e4m3"\nreduce = "e5m2"', "a").reduce.name
        == "e5m2"
    )
    assert recipe("msamp-o2").with_places({"gather": "fp32"}).gather.name == "fp32"


@pytest.mark.parametrize(
    "places",
    [{"fprop.w": "bf16"}, {"dgrad": "mxfp8"}, {"fprop.w": {"cast": "e4m3", "rounding": "stochastic"}}],
)
def test_an_operand_set_over_takes_the_gather_with_it(places):
    assert recipe("fp8").with_places(places).gather.name == "fp32"


def test_a_narrow_weight_travels_in_its_own_bytes():
    stochastic = {"cast": "bf16", "rounding": "stochastic"}
    assert recipe("fp8").with_places({"weight": stochastic}).gather == make_cast("bf16")
    assert recipe("msamp-o1").with_places({"weight": "fp32"}).gather == make_cast("fp32")


def test_kept_layers_travel_wide():
    r = recipe("msamp-o2")
    for name, gather, reduce in (("blocks.0.up", "fp16-scaled", "e4m3"), ("head", "fp32", "fp32")):
        of_layer = r.for_layer([(name, None)], 4)
        assert (of_layer.gather.name, of_layer.reduce.name) == (gather, reduce)
    assert recipe("fp8").for_layer([("head", None)], 4).gather.name == "fp32"
    assert recipe("fp8").in_high_precision().gather.name == "fp32"


E4M3 = 'fprop = "e4m3"\ndgrad = "e4m3"\n'
DELAYED = '{cast = "e4m3", history = 4}'
MISTAKES = {
    'gather = "mxfp8"\nfprop = "mxfp8"\ndgrad = "mxfp8"': r"gather = 'mxfp8', but weights can travel only",
    'gather = "e4m3"': r"gather = 'e4m3', .* at all times \(here 'bf16'\), .*write gather = \"fp32\"",
    'gather = "e4m3"\nfprop = "e4m3"\ndgrad = "e5m2"': r"\(here 'e4m3', 'e5m2'\)",
    f'gather = "e4m3"\n{E4M3}[[rule]]\nfrom_share = 0.9\nfprop = "bf16"': r"here 'e4m3', 'bf16'",
    f"gather = {DELAYED}\nfprop = {DELAYED}\ndgrad = {DELAYED}": r"gather = 'e4m3', but weights can travel",
    'gather = "bf16"\nweight = "fp16-scaled"': r"gather = 'bf16', but weights at rest in 'fp16-scaled'",
    'reduce = "mxfp8"': r"reduce = 'mxfp8', but gradients are added up in fp32, bf16, fp16, or in codes of",
    'reduce = "fp8-row"': r"reduce = 'fp8-row', but",
    'reduce = {cast = "e4m3", rounding = "stochastic"}': r"reduce = 'e4m3', .*sum rounded to the nearest",
    "reduce = 3": r"recipe place 'reduce' = 3, but it must be a cast",
}


@pytest.mark.parametrize(("text", "sentence"), MISTAKES.items(), ids=range(len(MISTAKES)))
def test_what_cannot_travel(text, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_recipe(text, "mine.toml")


def test_reduce_moves_the_trajectory_and_gather_does_not(tiny):
    plain, narrow, wide = (
        trajectory(make_config(tiny({f"recipe.{k}": v for k, v in places.items()})))
        for places in ({}, {"reduce": "bf16"}, {"gather": "fp32"})
    )
    assert plain == wide
    assert plain != narrow
