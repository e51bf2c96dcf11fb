"""What a comparison consists of: names that stay the same, and mistakes reported before anything runs."""

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.experiment.design import RECIPE, make_runs, parse_variant
from narrowgauge.trainer.laboratory.arguments import parse_seeds

SHORT = {"recipe": "recipe.name"}


def runs(recipes, seeds=None, **values):
    made = make_runs(values, [(name, {RECIPE: name}) for name in recipes.split(",")], seeds)
    return {run.name: run.config for run in made}


def test_one_seed_is_named_as_its_recipe_and_others_by_number():
    assert [*runs("bf16,fp8")] == ["bf16", "fp8"]
    assert [*runs("bf16,fp8", 2)] == ["bf16", "fp8", "bf16-seed-1", "fp8-seed-1"]
    assert [*runs("bf16", (7, 0), training={"seed": 7})] == ["bf16", "bf16-seed-0"]
    assert [*runs("bf16", 2, training={"seed": 7})] == ["bf16", "bf16-seed-8"]


def test_more_recipes_and_seeds_keep_the_runs_that_are_there():
    before, after = runs("bf16,fp8"), runs("bf16,mxfp8,fp8", 3)
    assert {name: after[name] for name in before} == before
    assert [config.training.seed for config in after.values()] == [0] * 3 + [1] * 3 + [2] * 3


def test_a_variant_sets_any_keys():
    variant = parse_variant("hp:recipe=fp8,optimizer.betas=0.9,0.95,recipe.wgrad.x=bf16", SHORT)
    keys = {"recipe.name": "fp8", "optimizer.betas": "0.9,0.95", "recipe.wgrad.x": "bf16"}
    assert variant == ("hp", keys)
    assert parse_variant("plain", SHORT) == ("plain", {})


SEEDS = ("x", "1,x", "", "0", "-1")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: runs("bf16"), "'bf16' is one run, and a comparison needs at least two"),
        (lambda: runs("a/x.toml,bf16"), "x.toml"),
        (lambda: runs("bf16", 2, optimizer={"rl": 1}), "optimizer.lr"),
        (lambda: runs("bf16", 2, optimizer={"lr": "x"}), "optimizer.lr = 'x'"),
        (lambda: runs("bf16,fp8", 600), "has 1200 runs"),
        (lambda: runs("bf16", (0, 0)), "name each once"),
        (lambda: parse_variant("hp:fp8", SHORT), "'fp8' is not KEY=VALUE"),
        (lambda: parse_variant("hp:recipe=fp8,recipe.name=bf16", SHORT), "recipe.name has two values"),
        (lambda: make_runs({}, [("a/b", {}), ("c", {})]), "names a directory"),
        (lambda: make_runs({}, [("a", {"training.seed": "1"}), ("c", {})]), "by --seeds"),
        *((lambda text=text: parse_seeds(text), "--seeds") for text in SEEDS),
    ],
)
def test_mistakes_are_sentences(make, words):
    with pytest.raises(UserError, match=words):
        make()
