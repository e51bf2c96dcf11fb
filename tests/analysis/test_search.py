"""The search against all assignments of a small problem, and its recipe against what was assigned."""

import itertools
import json
import math
import shlex
import tomllib
from functools import cache

import pytest

from narrowgauge.quantization import cast
from narrowgauge.recipes import GEMM_PLACES, GEMMS, load_recipe, parse_recipe
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.analysis import BASELINES, baselines, choices_of, flops_budget, recipe_text, solve

CASTS = {name: cast(name) for name in ("mxfp4", "mxfp8", "bf16")}
WEIGHTS = {"blocks.0.down": 300, "blocks.1.down": 300, "head": 100}


def gaps_of():
    """Gaps of one seed without a pattern, smaller for wider formats, some below zero."""
    sizes = {"mxfp4": 1.0, "mxfp8": 0.1, "bf16": 0.0}
    return {
        ((layer, gemm), name): {1: size * ((7 * i + 5 * j) % 11 - 1)}
        for name, size in sizes.items()
        for i, layer in enumerate(WEIGHTS)
        for j, gemm in enumerate(GEMMS)
    }


CHOICES = choices_of(CASTS, WEIGHTS, gaps_of())


def assignments(kept=()):
    """Every assignment of a format to each GEMM that is not kept wide."""
    free = [gemm for gemm in CHOICES.shares if gemm not in kept]
    for names in itertools.product(CASTS, repeat=len(free)):
        yield dict.fromkeys(kept, "bf16") | dict(zip(free, names, strict=True))


@cache
def costs_and_amounts():
    """The cost of each of the 19,683 assignments, and its amount in 4 bits."""
    return [(CHOICES.cost(one), CHOICES.amount(one, flops_budget(CASTS, 0.5))) for one in assignments()]


@pytest.mark.parametrize("budget", [flops_budget(CASTS, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)])
def test_no_assignment_within_the_budget_costs_less(budget):
    found = solve(CHOICES, budget)
    assert budget.holds(CHOICES.amount(found, budget))
    best = min(cost for cost, amount in costs_and_amounts() if budget.holds(amount))
    assert CHOICES.cost(found) == pytest.approx(best, abs=1e-12)


def test_the_cost_of_a_gemm_is_the_mean_of_its_forks_and_none_gains():
    gaps = {(("head", gemm), name): {1: 0.5, 2: -0.1} for gemm in GEMMS for name in CASTS}
    gaps[("head", "dgrad"), "mxfp8"] = {1: -0.5, 2: 0.1}
    found = choices_of(CASTS, {"head": 100}, gaps)
    assert found.costs["head", "fprop"]["mxfp4"] == pytest.approx(0.2)
    assert found.costs["head", "dgrad"]["mxfp8"] == 0
    assert found.measured({("head", "fprop"): "mxfp4", ("head", "dgrad"): "mxfp8"}).mean == pytest.approx(0)


def test_amounts_are_shares_and_all_gemms_of_a_layer_do_the_same_work():
    half = dict.fromkeys(CHOICES.shares, "bf16") | {("blocks.0.down", g): "mxfp4" for g in GEMMS}
    assert CHOICES.amount(half, flops_budget(CASTS, 0.5)) == pytest.approx(300 / 700)
    assert sum(CHOICES.shares.values()) == pytest.approx(1)
    assert CHOICES.shares["head", "wgrad"] == CHOICES.shares["head", "fprop"] == pytest.approx(100 / 2100)


def test_what_is_kept_stays_wide_and_the_rest_is_the_best():
    kept, budget = choices_of(CASTS, WEIGHTS, gaps_of(), keep=("head", "*.none")), flops_budget(CASTS, 0.57)
    found = solve(kept, budget)
    errors = dict.fromkeys(kept.shares, 0.1)
    others = baselines(kept, budget, errors, {"blocks.0.down": 0, "blocks.1.down": 1, "head": None}, 0)
    for assignment in (found, *others.values()):
        assert {assignment["head", gemm] for gemm in GEMMS} == {"bf16"}
    best = min(
        kept.cost(other) for other in assignments(kept.kept) if budget.holds(kept.amount(other, budget))
    )
    assert kept.cost(found) == pytest.approx(best)
    with pytest.raises(UserError, match=r"--budget 0.9: the most that can be reached is 0\.857 of the FLOPs"):
        solve(kept, flops_budget(CASTS, 0.9))


@pytest.mark.parametrize("budget", [0.25, 0.75, 1.0])
def test_the_recipe_says_what_was_assigned(budget):
    found = solve(CHOICES, flops_budget(CASTS, budget))
    recipe = parse_recipe(recipe_text(found, "mine", "title", "source"), "mine.toml")
    for layer in WEIGHTS:
        block = int(layer.split(".")[1]) if layer != "head" else None
        casts = recipe.for_layer([(layer, block)], 2).casts
        for gemm in GEMMS:
            assert {casts[p].name for p in GEMM_PLACES if p.startswith(gemm)} == {found[layer, gemm]}


def test_one_format_everywhere_needs_no_names():
    text = recipe_text(dict.fromkeys(CHOICES.shares, "mxfp4"), "all", "title", "source")
    assert tomllib.loads(text)["rule"] == [{"fprop": "mxfp4", "dgrad": "mxfp4", "wgrad": "mxfp4"}]


def test_the_baselines_keep_to_the_budget():
    budget = flops_budget(CASTS, 0.4)
    blocks = {"blocks.0.down": 0, "blocks.1.down": 1, "head": None}
    errors = {gemm: float(i) for i, gemm in enumerate(CHOICES.shares)}
    found = baselines(CHOICES, budget, errors, blocks, seed=0)
    assert tuple(found) == BASELINES
    assert set(found["uniform"].values()) == {"mxfp4"}
    for name in ("keep-ends", "smallest-error", "random"):
        amount = CHOICES.amount(found[name], budget)
        assert budget.holds(amount), name
        assert amount - 0.4 < 300 / 700, name  # and use it up
    narrow = {gemm for gemm, name in found["smallest-error"].items() if name == "mxfp4"}
    assert narrow == set(list(errors)[:3])
    assert all(found["keep-ends"]["head", gemm] == "bf16" for gemm in GEMMS)


@pytest.mark.parametrize(
    ("casts", "share", "sentence"),
    [
        (("mxfp8", "bf16"), 0.5, "none has 4 bits or fewer"),
        (CASTS, 1.5, "must be a share from 0 to 1"),
        (CASTS, math.nan, "must be a share from 0 to 1"),
    ],
)
def test_what_cannot_be_is_refused(casts, share, sentence):
    with pytest.raises(UserError, match=sentence):
        flops_budget({name: CASTS[name] for name in casts}, share)


def test_a_budget_between_whole_gemms_is_refused():
    one, above = choices_of(CASTS, {"head": 100}, gaps_of()), flops_budget(CASTS, 0.666)
    with pytest.raises(UserError, match=r"the next above has 0\.666, so take that"):
        solve(one, flops_budget(CASTS, 0.4))
    assert one.amount(solve(one, above), above) == pytest.approx(2 / 3)


WORDS = ("--formats", "mxfp4,bf16", "--budget", "0.5", "--batches", 1, "--batch-size", 2)
FORKS = ("--fork-steps", 1, "--fork-seeds", 1)


@pytest.mark.tier("thorough")
def test_the_command_writes_recipes_and_prints_the_line_that_compares_them(narrowgauge, trained, tmp_path):
    run, out = trained({"recipe.name": "bf16"}), tmp_path / "found.toml"
    done = narrowgauge("search", run, *WORDS, *FORKS, "--out", out)
    assert done.code == 0, done.err
    assert "of the FLOPs in 4 bits, predicted cost" in done.out
    assert load_recipe(out).name == "found"
    told = narrowgauge("search", run, *WORDS, *FORKS, "--keep", "head,blocks.0.qkv", "--out", out, "--json")
    answer = json.loads(told.out)
    assert answer["kept"] == ["blocks.0.qkv", "head"]
    assert 0.5 <= answer["amount"] <= 0.55
    assert tuple(answer["baselines"]) == BASELINES
    for words, sentence in (
        (("--keep", "lm_head", "--out", out), "--keep lm_head: no layer has this name; take one of qkv, "),
        (("--out", tmp_path / "uniform.toml"), "another recipe that it is compared with has this name"),
    ):
        refused = narrowgauge("search", run, *WORDS, *words)
        assert (refused.code, sentence in refused.err) == (2, True)
    words = shlex.split(answer["compare"])[1:]
    compared = narrowgauge(*words[:-2], "--steps", 2, "--out", tmp_path / "compared")
    assert compared.code == 0, compared.err
    assert {p.parent.name for p in (tmp_path / "compared").glob("*/status.json")} == {
        "bf16",
        "found",
        *BASELINES,
    }
