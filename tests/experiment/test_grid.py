"""What a comparison consists of: names that stay the same, and mistakes reported before anything runs."""

import tomllib

import pytest

from narrowgauge.errors import UserError
from narrowgauge.experiment.grid import (
    Variant,
    make_points,
    parse_seeds,
    parse_sweeps,
    parse_variant,
    recipe_variants,
    take_sweep,
)

SHORT = {"recipe": "recipe.name"}


def names(variants="", grid=None, seeds="", values=None):
    return [point.name for point in make_points(values or {}, recipe_variants(variants), grid or {}, seeds)]


def test_one_seed_is_named_as_its_recipe_and_others_by_number():
    assert names("bf16,fp8") == ["bf16", "fp8"]
    assert names("bf16,fp8", seeds="2") == ["bf16", "fp8", "bf16-seed-1", "fp8-seed-1"]
    assert names("bf16", seeds="7,0", values={"training": {"seed": 7}}) == ["bf16", "bf16-seed-0"]
    assert names("bf16", seeds="2", values={"training": {"seed": 7}}) == ["bf16", "bf16-seed-8"]


def test_more_recipes_and_seeds_keep_the_runs_that_are_there():
    before = {p.name: p.config for p in make_points({}, recipe_variants("bf16,fp8"), {}, "")}
    after = {p.name: p.config for p in make_points({}, recipe_variants("bf16,mxfp8,fp8"), {}, "3")}
    assert {name: after[name] for name in before} == before
    assert [config.training.seed for config in after.values()] == [0] * 3 + [1] * 3 + [2] * 3


def test_every_point_of_a_grid_has_a_readable_name():
    text = """
        [sweep]
        optimizer.lr = [1e-3, 0.02]
        "checkpoint.every" = [5]
        recipe.fprop.x = ["e4m3", "bf16"]
        optimizer.betas = [[0.9, 0.99]]
        recipe.name = ["bf16", "fp8"]
    """
    values, grid = take_sweep(tomllib.loads(text))
    assert values == {}
    found = make_points(values, [], grid, "")
    assert len(found) == 8
    assert found[0].name == "bf16,checkpoint.every=5,betas=0.9+0.99,lr=0.001,fprop.x=e4m3"
    assert found[-1].name == "fp8,checkpoint.every=5,betas=0.9+0.99,lr=0.02,fprop.x=bf16"
    config = found[-1].config
    assert (config.optimizer.lr, config.checkpoint.every, config.recipe.name) == (0.02, 5, "fp8")
    assert config.recipe.places == {"fprop.x": "bf16"}


def test_a_sweep_of_tables_and_lists_on_the_command_line_is_that_of_a_file():
    tables = '{element = "e4m3", block = 32, scale = "e8m0"}'
    grid = parse_sweeps([f"recipe.fprop.x={tables},bf16", "optimizer.betas=[0.9,0.95],[0.9,0.99]"], {})
    _, written = take_sweep(
        tomllib.loads(
            f'[sweep]\nrecipe.fprop.x = [{tables}, "bf16"]\noptimizer.betas = [[0.9, 0.95], [0.9, 0.99]]'
        )
    )
    for made in (names("mxfp8", grid), names("mxfp8", written)):
        assert sorted(made) == [
            "mxfp8,betas=0.9+0.95,fprop.x=bf16",
            "mxfp8,betas=0.9+0.95,fprop.x=element-e4m3-block-32-scale-e8m0",
            "mxfp8,betas=0.9+0.99,fprop.x=bf16",
            "mxfp8,betas=0.9+0.99,fprop.x=element-e4m3-block-32-scale-e8m0",
        ]
    configs = [
        make_points({}, recipe_variants("mxfp8"), g, "")[0].config.recipe.places for g in (grid, written)
    ]
    assert configs[0] == configs[1] == {"fprop.x": {"element": "e4m3", "block": 32, "scale": "e8m0"}}


def test_a_grid_holds_for_each_variant_and_may_hold_the_seeds():
    grid = {"optimizer.lr": [0.1, 0.2], "training.seed": [0, 4]}
    assert names("bf16,fp8", grid)[:4] == ["bf16,lr=0.1", "bf16,lr=0.2", "fp8,lr=0.1", "fp8,lr=0.2"]
    assert names("bf16,fp8", grid)[4] == "bf16,lr=0.1-seed-4"
    assert names(grid={"optimizer.lr": [0.1, 0.2]}) == ["fp8,lr=0.1", "fp8,lr=0.2"]


def test_seeds_of_a_sweep_are_those_of_the_option():
    swept = parse_sweeps(["seed=0,1"], {"seed": "training.seed"})
    assert names("bf16,fp8", swept) == names("bf16,fp8", seeds="0,1")
    assert names("bf16,fp8", {"training.seed": [0, 1]}) == names("bf16,fp8", seeds="0,1")


def test_a_variant_sets_any_keys():
    variant = parse_variant("hp:recipe=fp8,optimizer.betas=0.9,0.95,recipe.wgrad.x=bf16", SHORT)
    assert variant == Variant(
        "hp", {"recipe.name": "fp8", "optimizer.betas": "0.9,0.95", "recipe.wgrad.x": "bf16"}
    )
    assert parse_variant("plain", SHORT) == Variant("plain", {})


@pytest.mark.parametrize("text", ["x", "1,x", "", "0", "-1", "1,1", "5000"])
def test_seeds_that_are_none(text):
    with pytest.raises(UserError, match="--seeds"):
        parse_seeds(text, 0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: names("bf16"), "'bf16' is one run, and a comparison needs at least two"),
        (lambda: names("bf16,fp8,bf16"), "two runs would be called 'bf16'"),
        (lambda: names("a/x.toml,bf16"), "x.toml"),
        (lambda: names("bf16,fp8", {"recipe.name": ["fp8"]}), "both set recipe.name"),
        (lambda: names("bf16", {"training.seed": [1, 2]}, "3"), "both say which seeds"),
        (lambda: names("bf16", {"optimizer.rl": [1, 2]}), "optimizer.lr"),
        (lambda: names("bf16", {"optimizer.lr": [1, "x"]}), "optimizer.lr = 'x'"),
        (lambda: names("bf16,fp8", seeds="600"), "has 1200 runs"),
        (lambda: names("bf16", {"training.seed": ["0", "00"]}), "names a seed twice"),
        (lambda: parse_sweeps(["lr=1,2", "optimizer.lr=3"], {"lr": "optimizer.lr"}), "is swept twice"),
        (lambda: take_sweep({"sweep": {"optimizer": {"lr": 0.1}}}), "a list of values"),
        (lambda: take_sweep({"sweep": {"optimizer": {"lr": []}}}), "a list of values"),
        (
            lambda: take_sweep({"sweep": {"recipe": {"fprop": {"x": {"element": "e4m3"}}}}}),
            "is written in a list",
        ),
        (lambda: take_sweep({"sweep": [{"optimizer": {"lr": 0.1}}]}), "is one table"),
        (lambda: take_sweep({"sweep": {"lr": [0.1, 0.2]}}), "write the section and the key"),
        (lambda: take_sweep({"sweep": {"optimizer": [{"lr": 0.1}]}}), "write the section and the key"),
        (lambda: parse_variant("hp:fp8", SHORT), "'fp8' is not KEY=VALUE"),
        (lambda: parse_variant("hp:recipe=fp8,recipe.name=bf16", SHORT), "recipe.name has two values"),
        (lambda: make_points({}, [Variant("a/b", {}), Variant("c", {})], {}, ""), "names a directory"),
        (
            lambda: make_points({}, [Variant("a", {"training.seed": "1"}), Variant("c", {})], {}, ""),
            "by --seeds",
        ),
    ],
)
def test_mistakes_are_sentences(make, words):
    with pytest.raises(UserError, match=words):
        make()
