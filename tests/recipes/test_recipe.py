"""Recipes as data: what ships, a user's own file, overrides, and a sentence for every mistake."""

import importlib.resources

import pytest

from narrowgauge.errors import UserError
from narrowgauge.quantization import cast_names, make_cast
from narrowgauge.recipes import (
    ATTENTION_PLACES,
    GEMM_PLACES,
    PLACES,
    STATE_PLACES,
    Rule,
    load_recipe,
    parse_recipe,
    recipe,
    recipe_names,
)

FOLDER = importlib.resources.files("narrowgauge.recipes") / "shipped"

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


def test_the_files_that_ship_are_the_names():
    files = {f.name.removesuffix(".toml") for f in FOLDER.iterdir() if f.name.endswith(".toml")}
    assert files == set(recipe_names())
    assert len(recipe_names()) == len(files)


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_says_what_it_is(name):
    r = recipe(name)
    assert r.name == name
    assert r.title
    assert r.source
    assert r.text == (FOLDER / f"{name}.toml").read_text()
    assert set(r.casts) == set(GEMM_PLACES)
    assert r.is_narrow == (name not in ("fp32", "bf16", "bf16-sr", "eco", "fp16"))
    assert not r.in_high_precision().for_layer([("up", 0)], 4).is_narrow


def test_fp8_is_hybrid_and_keeps_the_head():
    r = recipe("fp8")
    gradients = {"dgrad.dy", "wgrad.dy"}
    assert {p: c.name for p, c in r.casts.items()} == {
        p: "e5m2" if p in gradients else "e4m3" for p in GEMM_PLACES
    }
    (keep,) = r.rules
    assert keep.modules == ("head", "lm_head")
    assert set(keep.casts.values()) == {make_cast("bf16")}


def test_nvfp4_has_its_four_remedies():
    r = recipe("nvfp4")
    assert r.casts["fprop.w"] == r.casts["dgrad.w"] == make_cast("nvfp4-2d")
    assert {p for p, c in r.casts.items() if c.hadamard.size == 16} == {"wgrad.dy", "wgrad.x"}
    assert {p for p, c in r.casts.items() if c.rounding.mode == "stochastic"} == {"dgrad.dy", "wgrad.dy"}
    assert r.rules[-1].last_blocks == 0.15


@pytest.mark.parametrize("name", [n for n in recipe_names() if n.startswith("mx") and n in cast_names()])
def test_mx_recipes_have_one_cast_everywhere(name):
    assert set(recipe(name).casts.values()) == {make_cast(name)}
    assert make_cast(name).scales.rule == "rceil"


def test_ones_own_file(tmp_path):
    path = tmp_path / "paper.toml"
    path.write_text(MINE)
    r = load_recipe(path)
    assert r == recipe(str(path)) == parse_recipe(MINE, "anywhere")
    assert (r.name, r.title, r.compute, r.text) == ("mine", "one line", "fp32", MINE)
    assert r.rules == (
        Rule(
            casts=dict.fromkeys(GEMM_PLACES, make_cast("fp32")),
            attention=dict.fromkeys(ATTENTION_PLACES),
            keeps_state=True,
            modules=("lm_*",),
            last_blocks=0.25,
        ),
    )
    assert {p: c.name for p, c in r.casts.items() if c.name != "fp32"} == {
        "fprop.x": "mxfp4",
        "wgrad.dy": "nvfp4",
        "wgrad.x": "bf16",
    }
    assert r.casts["wgrad.dy"] == make_cast({"cast": "nvfp4", "rounding": "stochastic", "hadamard": 32})


def test_a_file_without_a_name_is_called_like_the_file(tmp_path):
    path = tmp_path / "paper.toml"
    path.write_text("compute = 'bf16'")
    r = load_recipe(path)
    assert (r.name, r.compute) == ("paper", "bf16")
    assert set(r.casts.values()) == {make_cast("bf16")}
    assert not r.is_narrow


def test_a_table_with_only_a_cast_is_its_name():
    assert (
        parse_recipe('[fprop]\nx = {cast = "e4m3"}', "a").casts
        == parse_recipe('[fprop]\nx = "e4m3"', "a").casts
    )


def test_overrides_change_only_the_places_they_name():
    before = recipe("fp8")
    after = before.with_places({"fprop.x": "bf16", "wgrad.dy": {"cast": "mxfp4", "rounding": "stochastic"}})
    assert after.casts["fprop.x"] == make_cast("bf16")
    assert after.casts["wgrad.dy"] == make_cast({"cast": "mxfp4", "rounding": "stochastic"})
    unchanged = set(GEMM_PLACES) - {"fprop.x", "wgrad.dy"}
    assert all(after.casts[p] == before.casts[p] for p in unchanged)
    assert before == recipe("fp8")
    assert before.casts["fprop.x"] == make_cast("e4m3")
    assert (after.name, after.rules) == (before.name, before.rules)


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


STATES = {"weight": "fp16-scaled", "master": "bf16", "grad": "e4m3", "m": "coat", "v": "fp8-1x128"}


def test_state_is_wide_unless_a_recipe_says_otherwise():
    assert {p: c and c.name for p, c in recipe("nvfp4").state.items()} == dict.fromkeys(
        STATE_PLACES, "fp32"
    ) | {"master": None}
    spelled_out = dict.fromkeys(STATE_PLACES, "fp32") | {"master": "none"}
    assert recipe("bf16").with_places(spelled_out) == recipe("bf16")


def test_state_by_override_and_by_file():
    by_override = recipe("mxfp4").with_places(STATES)
    assert {p: c.name for p, c in by_override.state.items()} == STATES
    text = "\n".join(f'{p} = "{c}"' for p, c in STATES.items())
    assert parse_recipe(text, "mine.toml").state == by_override.state
    assert by_override.casts == recipe("mxfp4").casts


def test_kept_layers_keep_wide_weights_and_gradients():
    r = recipe("msamp-o3")
    inside, head = (r.for_layer([(name, None)], 4).state for name in ("blocks.0.up", "head"))
    assert [c and c.name for c in inside.values()] == ["e4m3", "fp16-scaled", "e4m3", "e4m3", "fp16-scaled"]
    assert [c and c.name for c in head.values()] == ["fp32", None, "fp32", "e4m3", "fp16-scaled"]


@pytest.mark.parametrize(
    ("places", "sentence"),
    [
        (
            {"master": "bf16"},
            r"master = 'bf16' with weights in fp32, but a master is a wider copy of narrow",
        ),
        (
            {"weight": "mxfp4"},
            r"weight = 'mxfp4', but a weight needs a format that torch can hold and fp32 sca",
        ),
        ({"weight": "coat"}, r"weight = 'coat', but a weight needs"),
        ({"weight": "none"}, r"recipe place 'weight': unknown cast 'none'"),
        (
            {"m": {"cast": "mxfp4", "hadamard": 16}},
            r"hadamard in place 'm', but transforms belong to GEMM operands",
        ),
        ({"v": {"cast": "e4m3", "history": 4}}, r"history in place 'v', but state takes its scales from"),
        (
            {"fprop.x": "coat"},
            r"recipe place 'fprop\.x': cast 'coat' is for state \(weight, master, grad, m, v\)",
        ),
        ({"wgrad": "fp16-scaled"}, r"recipe place 'wgrad\..*': cast 'fp16-scaled' is for state"),
    ],
)
def test_state_that_cannot_be(places, sentence):
    with pytest.raises(UserError, match=sentence):
        recipe("bf16").with_places(places)


def test_overriding_every_narrow_place_makes_a_recipe_wide():
    wide = recipe("nvfp4").with_places(dict.fromkeys(GEMM_PLACES, "bf16"))
    assert not wide.is_narrow
    assert recipe("fp32").with_places({"dgrad.w": "bf16"}).is_narrow


MISTAKES = {
    "name = ": r"recipe mine\.toml is not valid TOML: Invalid value",
    'compte = "bf16"': r"recipe mine\.toml: unknown key 'compte'; the nearest is 'compute' \(known: name, ",
    'compute = "fp8"': r"recipe mine\.toml: compute = 'fp8', but it must be one of bf16, fp16, fp32",
    "name = 3": r"recipe mine\.toml: name = 3, but it must be text in quotes",
    "title = 3": r"recipe mine\.toml: title = 3, but it must be text",
    "keep = 3": r"recipe mine\.toml: keep = 3, but it must be a table; write \[keep\]",
    "fprop = 3": r"recipe mine\.toml: fprop = 3, but it must be a table; write \[fprop\]",
    'fprop = "e4m4"': r"recipe place 'fprop\.x': unknown cast 'e4m4'; the nearest is 'e4m3'",
    "rule = 3": r"recipe mine\.toml: rule must be a list of tables; write \[\[rule\]\] above each",
    "[[rule]]\nform = 3": r"recipe mine\.toml: unknown \[\[rule\]\] key 'form'; the nearest is 'from'",
    "[[rule]]\nfrom = 3": r"from = 3, but the schedule's only clock is \"decay\"; write that, or from_step",
    '[[rule]]\nuntil = "warmup"': r"until = 'warmup', but the schedule's only clock is \"decay\"",
    "[[rule]]\nuntil_step = -1": r"until_step = -1, but it must be a number of steps",
    "[[rule]]\nfrom_step = 5\nuntil_step = 5": r"until_step = 5 and from_step = 5, but then the rule never",
    '[[rule]]\nfrom = "decay"\nuntil = "decay"': r"until = 'decay' and from = 'decay', but then the rule",
    "[[rule]]\nfrom_step = 0.5": r"from_step = 0\.5, but it must be a number of steps",
    "[[rule]]\nfrom_share = 2": r"from_share = 2, but it must be a share from 0 to 1",
    '[[rule]]\nwgrad.x = {cast = "bf16", hadamard = 16}': r"rule 1: hadamard = 0 in wgrad\.dy and 16",
    'saved = "operands"': r"recipe place 'saved': unknown value 'operands'; the nearest is 'operand'",
    '[dgrad]\nw = "fprop.ww"': r"recipe place 'dgrad\.w': unknown value 'fprop\.ww'; .* 'fprop\.w'",
    'master = "non"': r"recipe place 'master': unknown value 'non'; the nearest is 'none'",
    'saved = "nothing"': r"recipe place 'saved': unknown cast 'nothing'",
    'saved = "operand"\nfprop = {cast = "mxfp4", hadamard = 32}': r"saved = 'operand', but fprop\.x has hada",
    'fprop.x = {cast = "e4m3", history = -1}': r"history = -1, but it must be a number of steps",
    'fprop.x = {cast = "mxfp8", history = 4}': r"history = 4, but it needs one fp32 scale a tensor",
    'fprop.x = {cast = "nvfp4", signs = "fixed"}': r"signs = 'fixed', but \"random\" or one",
    'fprop.x = {cast = "nvfp4", hadamard = 4, signs = [1, 1, 2, 1]}': r"signs = \(1, 1, 2, 1\), but",
    'fprop.x = {cast = "mxfp4", random_bits = 0}': r"random_bits = 0, but it must lie in 1 to 24",
    'fprop.x = {cast = "fp4-row", outliers = 0.2}': r"outliers = 0\.2, but it must be 0 or a quantile",
    'fprop.w = {cast = "mxfp4", estimator_k = 5}': r"estimator_k = 5, but it needs fp32 scales",
    "[keep]\nmodule = []": r"recipe mine\.toml: unknown \[keep\] key 'module'; the nearest is 'modules'",
    '[keep]\nmodules = "head"': r"recipe mine\.toml: modules = 'head', but it must be a list of names",
    "[keep]\nmodules = [1]": r"recipe mine\.toml: modules = \[1\], but it must be a list of names",
    "[keep]\nlast_blocks = 1.5": r"recipe mine\.toml: last_blocks = 1\.5, but it must be a share from 0 to 1",
    "[keep]\nlast_blocks = -0.1": r"last_blocks = -0\.1, but it must be a share",
    "[keep]\nlast_blocks = nan": r"last_blocks = nan, but it must be a share",
    '[keep]\nlast_blocks = "2"': r"last_blocks = '2', but it must be a share",
    "[keep]\nlast_blocks = true": r"last_blocks = True, but it must be a share",
    '[fprop]\ny = "e4m3"': r"unknown recipe place 'fprop\.y'; the nearest is 'fprop\.x'",
    '[wgrad]\nw = "e4m3"': r"unknown recipe place 'wgrad\.w'",
    '[dgrad]\nw = "mxpf4"': r"recipe place 'dgrad\.w': unknown cast 'mxpf4'; the nearest is 'mxfp4'",
    "[dgrad]\nw = 4": r"recipe place 'dgrad\.w' = 4, but it must be a cast such as \"mxfp4\", or a table",
    '[fprop]\nx = {rounding = "stochastic"}': r"recipe place 'fprop\.x': unknown cast ",
    '[fprop]\nx = {cast = "mxfp4", rounding = "up"}': r"'fprop\.x': unknown rounding 'up'",
    '[fprop]\nx = {cast = "mxfp4", round = "stochastic"}': r"unknown cast key 'round'; .* 'rounding'",
    '[fprop]\nx = {cast = "mxfp4", hadamard = 12}': r"hadamard = 12, but it must be 0 or a power of two",
    '[fprop]\nx = {cast = "e4m3", scale_rule = "floor"}': r"a scale rule belongs to E8M0 scales only",
    '[fprop]\nx = {cast = "nvfp4", hadamard = 16}': r"^recipe mine\.toml: hadamard = 16 in fprop\.x and 0 in "
    r"fprop\.w, but the product stays the same only if both operands are transformed alike; give both places",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_a_file_is_told_in_a_sentence(text):
    with pytest.raises(UserError, match=MISTAKES[text]) as caught:
        parse_recipe(text, "mine.toml")
    assert str(caught.value).startswith("recipe mine.toml")  # whatever the mistake, the file is named
    assert "\n" not in str(caught.value)


def test_an_override_may_not_part_a_pair_of_transforms():
    with pytest.raises(UserError, match=r"hadamard = 16 in wgrad\.dy and 0 in wgrad\.x"):
        recipe("nvfp4").with_places({"wgrad.x": "bf16"})
    pair = {"wgrad.dy": "nvfp4", "wgrad.x": "bf16"}
    assert recipe("nvfp4").with_places(pair).casts["wgrad.x"] == make_cast("bf16")


def test_unknown_names():
    with pytest.raises(UserError, match="unknown recipe 'mxpf4'; the nearest is 'mxfp4'"):
        recipe("mxpf4")
    with pytest.raises(
        UserError, match="unknown recipe 'msamp'; what MS-AMP's scripts call so is 'msamp-o2'"
    ):
        recipe("msamp")
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


def test_a_recipe_shows_its_name_title_and_operands_in_two_lines():
    shown = repr(recipe("nvfp4"))
    assert shown.startswith("<Recipe 'nvfp4': NVFP4: E4M3 scales of 16 under a tensor scale")
    assert shown.endswith(
        "\n fprop(x=nvfp4, w=nvfp4-2d), dgrad(dy=nvfp4, w=nvfp4-2d), wgrad(dy=nvfp4, x=nvfp4), "
        "compute=bf16, 1 rule>"
    )
    assert "dgrad(dy=e2m1-1x16-e4m3-per-128, w=fprop.w)" in repr(recipe("tetrajet2"))
    for name in recipe_names():
        assert len(repr(recipe(name))) < 400, name
        assert repr(recipe(name)).count("\n") == 1, name


def test_a_cast_shows_the_keys_that_it_has():
    w = recipe("fp4").casts["fprop.w"]
    assert repr(w) == "Cast('fp4-row', element=e2m1, scale='fp32', block=(1, 0), estimator_k=5)"
    assert repr(make_cast("bf16")) == "Cast('bf16', element=bf16)"
