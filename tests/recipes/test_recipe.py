"""Recipes as data: what ships, a user's own file, overrides, and a sentence for every mistake."""

import importlib.resources
from dataclasses import replace

import pytest

from narrowgauge.quantization import make_cast
from narrowgauge.recipes import Rule, load_recipe, parse_recipe, recipe, recipe_names
from narrowgauge.recipes.places import ATTENTION_PLACES, GEMM_PLACES, PLACES
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.training.config.config import make_config
from narrowgauge.trainer.training.config.diff import trajectory

FOLDER = importlib.resources.files("narrowgauge.recipes") / "shipped"
WIDE = ("fp32", "bf16", "bf16-sr", "eco", "fp16")


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_says_what_it_is(name):
    """What its casts are is in tests/golden/resolved."""
    r = recipe(name)
    assert r.name == name
    assert r.title
    assert r.source
    assert r.text == (FOLDER / f"{name}.toml").read_text()
    assert set(r.casts) == set(GEMM_PLACES)
    assert r.is_narrow == (name not in WIDE)
    assert not r.in_high_precision().for_layer([("up", 0)], 4).is_narrow
    assert len(repr(r)) < 400
    assert repr(r).count("\n") == 1


MINE = """
name = "mine"
title = "one line"
compute = "fp32"
m = "fp32"

[keep]
modules = ["lm_*"]
last_blocks = 0.25

[fprop]
x = "mxfp4"

[wgrad]
dy = {cast = "nvfp4", rounding = "stochastic", hadamard = 32}
x = {cast = "bf16", hadamard = 32}
"""


def test_ones_own_file(tmp_path):
    path = tmp_path / "paper.toml"
    path.write_text(MINE)
    r = load_recipe(path)
    assert r == recipe(str(path)) == parse_recipe(MINE, "anywhere")
    assert (r.name, r.title, r.compute, r.text) == ("mine", "one line", "fp32", MINE)
    assert r.rules == (
        Rule(
            places=dict.fromkeys(GEMM_PLACES, make_cast("fp32")) | dict.fromkeys(ATTENTION_PLACES),
            keeps_state=True,
            modules=("lm_*",),
            last_blocks=0.25,
        ),
    )
    narrow = {"fprop.x": "mxfp4", "wgrad.dy": "nvfp4", "wgrad.x": "bf16"}
    assert {p: c.name for p, c in r.casts.items() if c.name != "fp32"} == narrow
    assert r.casts["wgrad.dy"] == make_cast({"cast": "nvfp4", "rounding": "stochastic", "hadamard": 32})
    path.write_text("compute = 'bf16'")
    r = load_recipe(path)
    assert (r.name, r.compute, r.is_narrow) == ("paper", "bf16", False), "called like the file"
    assert set(r.casts.values()) == {make_cast("bf16")}
    by_dict = recipe({"compute": "fp32", "fprop.x": "mxfp4", "keep": {"modules": ["lm_*"]}})
    assert (by_dict.casts["fprop.x"], by_dict.rules[0].modules) == (make_cast("mxfp4"), ("lm_*",))


def test_overrides_change_only_the_places_they_name():
    before, table = recipe("fp8"), {"cast": "mxfp4", "rounding": "stochastic"}
    after = before.with_places({"fprop.x": "bf16", "wgrad.dy": table})
    changed = {"fprop.x": make_cast("bf16"), "wgrad.dy": make_cast(table)}
    assert after.casts == {**before.casts, **changed}
    assert before == recipe("fp8")
    assert (after.name, after.rules) == (before.name, before.rules)
    both = {"wgrad.dy": "bf16", "wgrad.x": "bf16"}
    assert before.with_places({"wgrad": "bf16"}) == before.with_places(both), "a GEMM is both of its operands"
    assert not recipe("nvfp4").with_places(dict.fromkeys(GEMM_PLACES, "bf16")).is_narrow
    assert recipe("fp32").with_places({"dgrad.w": "bf16"}).is_narrow


def test_an_override_may_not_part_a_pair_of_transforms():
    with pytest.raises(UserError, match=r"hadamard = 16 in wgrad\.dy and 0 in wgrad\.x"):
        recipe("nvfp4").with_places({"wgrad.x": "bf16"})
    pair = {"wgrad.dy": "nvfp4", "wgrad.x": "bf16"}
    assert recipe("nvfp4").with_places(pair).casts["wgrad.x"] == make_cast("bf16")


def test_keep_replaces_the_modules_that_stay_wide_and_leaves_blocks():
    none, more = (recipe("fp8").with_places({"keep": k}) for k in ("none", "head, *.down"))
    assert not none.rules
    assert none == recipe("fp8").with_places({"keep": []})
    assert none.for_layer([("head", None)], 2).casts == none.casts
    (rule,) = more.rules
    assert rule.modules == ("head", "*.down")
    assert rule.keeps_state
    blocks = recipe("nvfp4").with_places({"keep": "none"}).rules
    assert [(r.modules, r.last_blocks) for r in blocks] == [((), 0.15)]
    assert recipe("fp8").with_places({"keep": "head,lm_head"}) == recipe("fp8")
    with pytest.raises(UserError, match=r'keep = 3, but it must be a list of names such as \["head"\]'):
        recipe("fp8").with_places({"keep": 3})


#: A recipe, overrides, and the formats in which weights and gradients travel: weights as their operands, or
#: as they are at rest.
TRAVELS = [
    ("msamp-o2", {"gather": "fp32", "reduce": "e5m2"}, "fp32", "e5m2"),
    ("fp8", {"fprop.w": "bf16"}, "fp32", "fp32"),
    ("fp8", {"dgrad.w": "fprop.w"}, "e4m3", "fp32"),
    ("fp8", {"dgrad.w": {"cast": "e4m3", "of": "fprop.w"}}, "fp32", "fp32"),
    ("fp8", {"fprop.w": {"cast": "e4m3", "rounding": "stochastic"}}, "fp32", "fp32"),
    ("fp8", {"weight": {"cast": "bf16", "rounding": "stochastic"}}, "bf16", "fp32"),
]


@pytest.mark.parametrize(("name", "places", "gather", "reduce"), TRAVELS)
def test_what_travels(name, places, gather, reduce):
    r = recipe(name).with_places(places)
    assert (r["gather"].name, r["reduce"].name) == (gather, reduce)


def test_reduce_moves_the_trajectory_and_gather_does_not(tiny):
    plain, narrow, wide = (
        trajectory(make_config(tiny({f"recipe.{k}": v for k, v in places.items()})))
        for places in ({}, {"reduce": "bf16"}, {"gather": "fp32"})
    )
    assert plain == wide
    assert plain != narrow


E4M3 = 'fprop = "e4m3"\ndgrad = "e4m3"\n'
DELAYED = '{cast = "e4m3", history = 4}'
MISTAKES = {
    "name = ": r"recipe mine\.toml is not valid TOML: Invalid value",
    'compte = "bf16"': r"recipe mine\.toml: unknown key 'compte'; the nearest is 'compute' \(known: name, ",
    'compute = "fp8"': r"recipe mine\.toml: compute = 'fp8', but it must be one of bf16, fp16, fp32",
    "keep = 3": r"recipe mine\.toml: keep = 3, but it must be a table; write \[keep\]",
    'fprop = "e4m4"': r"recipe place 'fprop\.x': unknown cast 'e4m4'; the nearest is 'e4m3'",
    "rule = 3": r"recipe mine\.toml: rule must be a list of tables; write \[\[rule\]\] above each",
    "[[rule]]\nfrom = 3": r"from = 3, but it must be \"decay\", the schedule's only clock; or write from_",
    "[[rule]]\nuntil_step = -1": r"until_step = -1, but it must be a number of steps",
    "[[rule]]\nfrom_step = 5\nuntil_step = 5": r"until_step = 5 and from_step = 5, but then the rule never",
    "[[rule]]\nfrom_share = 2": r"from_share = 2, but it must be a share from 0 to 1",
    '[[rule]]\nwgrad.x = {cast = "bf16", hadamard = 16}': r"rule 1: hadamard = 0 in wgrad\.dy and 16",
    '[dgrad]\nw = "fprop.ww"': r"recipe place 'dgrad\.w': unknown value 'fprop\.ww'; .* 'fprop\.w'",
    'saved = "operand"\nfprop = {cast = "mxfp4", hadamard = 32}': r"saved = 'operand', but fprop\.x has hada",
    'fprop.x = {cast = "e4m3", history = -1}': r"history = -1, but it must be a number of steps",
    'fprop.x = {cast = "mxfp8", history = 4}': r"history = 4, but it needs one fp32 scale a tensor",
    'fprop.x = {cast = "nvfp4", signs = "fixed"}': r"signs = 'fixed', but \"random\" or one",
    'fprop.x = {cast = "nvfp4", hadamard = 4, signs = [1, 1, 2, 1]}': r"signs = \(1, 1, 2, 1\), but",
    'fprop.x = {cast = "fp4-row", outliers = 0.2}': r"outliers = 0\.2, but it must be 0 or a quantile",
    'fprop.w = {cast = "mxfp4", estimator_k = 5}': r"estimator_k = 5, but it needs fp32 scales",
    '[keep]\nmodules = "head"': r"recipe mine\.toml: modules = 'head', but it must be a list of names",
    "[dgrad]\nw = 4": r"recipe place 'dgrad\.w' = 4, but it must be a cast such as \"mxfp4\", or a table",
    '[fprop]\nx = {cast = "mxfp4", hadamard = 12}': r"hadamard = 12, but it must be 0 or a power of two",
    '[fprop]\nx = {cast = "nvfp4", hadamard = 16}': r"^recipe mine\.toml: hadamard = 16 in fprop\.x and 0 in",
    # state
    'master = "bf16"': r"master = 'bf16' with weights in fp32, but a master is a wider copy of narrow",
    'weight = "mxfp4"': r"weight = 'mxfp4', but a weight needs a format that torch can hold and fp32 sca",
    'm = {cast = "mxfp4", hadamard = 16}': r"'m': hadamard = 16, but transforms belong to GEMM operands",
    'v = {cast = "e4m3", history = 4}': r"'v': history = 4, but state takes its scales from",
    'fprop.x = "coat"': r"'fprop\.x': cast 'coat' is for state \(weight, master, grad, m, v\)",
    # operands that are used again, held magnitudes, attention and the stream
    'dgrad.w = "fprop.x"': r"'fprop\.x', but that is another tensor, .* sees this one before is 'fprop\.w'",
    'fprop.x = "fprop.w"': r"fprop\.x = 'fprop\.w', but no place sees its tensor before; name a cast",
    'fprop = {cast = "mxfp4", hadamard = 32}\ndgrad.w = "fprop.w"': r"fprop\.w is transformed \(hadamard\)",
    'saved = "mxfp8"\nwgrad.x = "fprop.x"': r"wgrad\.x = 'fprop\.x' with saved = 'mxfp8', but",
    'm = {cast = "e4m3", of = "fprop.w"}': r"m = 'fprop\.w', but only dgrad\.w, wgrad\.x, wgrad\.dy take",
    '[[rule]]\nmodules = ["up"]\nwgrad.x = "fprop.w"': r"rule 1: wgrad\.x = 'fprop\.w', but that is another",
    'fprop.x = {cast = "mxfp4", refresh = 50}': "refresh = 50, but it holds the largest magnitude",
    'fprop.x = {cast = "e4m3", refresh = 50}': "scales of this cast are current; leave it out",
    'fprop.x = {cast = "nvfp4", refresh = 1}': "refresh = 1, but it is a number of steps, two or more",
    'fprop.x = {cast = "nvfp4", refresh = 9, center = "tokens"}': "what is held is of the tensor as it comes",
    'm = {cast = "nvfp4", refresh = 9}': "'m': refresh = 9, but it belongs to GEMM operands",
    '[attention]\nx = "e4m3"': "unknown recipe place 'attention.x'.*nearest",
    '[attention]\nq = {cast = "e4m3", history = 3}': "attention.q.*history = 3.*leave the key out",
    '[attention]\nq = {cast = "mxfp4", hadamard = 32}': "attention.q and 0 in attention.k.*alike",
    '[attention]\np = {cast = "mxfp4", hadamard = 32, signs = "random"}': "fixed signs",
    'stream = {cast = "mxfp8", hadamard = 32}': "stream.*hadamard = 32.*leave the key out",
    "attention = 3": r"attention = 3, but it must be a table; write \[attention\]",
    # feedback
    'weight = {cast = "e4m3", feedback = "moment"}': "unknown feedback 'moment'",
    'weight = {cast = "fp32", feedback = "momentum"}': "it is for narrow weights without a master",
    'm = {cast = "e4m3", feedback = "momentum"}': "'m': feedback = 'momentum', but it belongs to weight",
    'fprop.w = {cast = "e4m3", feedback = "momentum"}': "it belongs to weight; remove the key",
    # the wire
    'gather = "mxfp8"\nfprop = "mxfp8"\ndgrad = "mxfp8"': r"gather = 'mxfp8', but weights can travel only",
    'gather = "e4m3"': r"gather = 'e4m3', .* at all times \(here 'bf16'\), .*write gather = \"fp32\"",
    f'gather = "e4m3"\n{E4M3}[[rule]]\nfrom_share = 0.9\nfprop = "bf16"': r"here 'e4m3', 'bf16'",
    f"gather = {DELAYED}\nfprop = {DELAYED}\ndgrad = {DELAYED}": r"gather = 'e4m3', but weights can travel",
    'gather = "bf16"\nweight = "fp16-scaled"': r"gather = 'bf16', but weights at rest in 'fp16-scaled'",
    'reduce = "mxfp8"': r"reduce = 'mxfp8', but gradients are added up in fp32, bf16, fp16, or in codes of",
    'reduce = {cast = "e4m3", rounding = "stochastic"}': r"reduce = 'e4m3', .*sum rounded to the nearest",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_a_file_is_told_in_a_sentence(text):
    with pytest.raises(UserError, match=MISTAKES[text]) as caught:
        parse_recipe(text, "mine.toml")
    assert str(caught.value).startswith("recipe mine.toml")  # whatever the mistake, the file is named
    assert "\n" not in str(caught.value)


def test_unknown_names():
    for name, words in (("mxpf4", "the nearest is 'mxfp4'"), ("msamp", "what MS-AMP's .* is 'msamp-o2'")):
        with pytest.raises(UserError, match=f"unknown recipe '{name}'; {words}"):
            recipe(name)
    with pytest.raises(UserError, match="'fp8': reduce = 'nvfp4', but gradients are added up"):
        replace(recipe("fp8"), places={**recipe("fp8").places, "reduce": make_cast("nvfp4")})
    with pytest.raises(UserError, match=r"unknown recipe place 'fprop\.z'") as caught:
        recipe("fp8").with_places({"fprop.z": "bf16"})
    assert all(place in str(caught.value) for place in PLACES)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"recipe file .*none\.toml does not exist"):
        recipe(str(tmp_path / "none.toml"))
    with pytest.raises(UserError, match="cannot be read"):
        load_recipe(tmp_path)
    (tmp_path / "latin.toml").write_bytes('name = "f\xfcr"'.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.toml cannot be read: .*utf-8"):
        load_recipe(tmp_path / "latin.toml")
