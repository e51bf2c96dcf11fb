"""Costs by training: forks against the run that they stand for."""

import json
import statistics

import pytest

import narrowgauge as ng
from narrowgauge.quantization import cast
from narrowgauge.recipes import GEMMS
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.analysis import Forks, only_in, open_probed
from narrowgauge.trainer.analysis.forks import wide
from narrowgauge.trainer.report import read_run

STEPS, START = 6, 4

#: Changes of the head's forward pass; bf16 has no effect.
LIBRARY = {name: {"fprop.x": cast(name), "fprop.w": cast(name)} for name in ("mxfp4", "bf16")}
#: A bf16 run of one block, each layer and place of which is forked; its rate is still high at its end.
CHANGES = {"recipe.name": "bf16", "model.layers": 1, "schedule.kind": "constant", "optimizer.lr": 4e-3}
CHANGES |= {"training.steps": START, "checkpoint.every": START}
CHANGES |= {"training.batch_size": 8, "training.micro_batch_size": 8}


@pytest.fixture
def run(trained):
    return trained(CHANGES)


@pytest.mark.tier("thorough")
def test_a_change_without_effect_costs_nothing_to_the_last_digit(run):
    probed = open_probed(run, "cpu", batches=4, batch_size=8)
    recipe = probed.trained.config.spec.recipe
    gaps = Forks(STEPS, 2).gaps(probed, {name: only_in(recipe, "head", of) for name, of in LIBRARY.items()})
    assert set(gaps["bf16"].values()) == {0.0}
    assert 0.0 not in gaps["mxfp4"].values()


def test_a_fork_is_the_branch_that_train_makes(run, tmp_path):
    """`train --branch` with the fork's seed and steps ends with the same validation loss."""
    seed, steps = read_run(run).config["training"]["seed"], START + STEPS
    sections = {"training": {"steps": steps, "seed": seed + 1}, "checkpoint": {"every": 100}}
    sections["validation"] = {"every": steps, "batches": 4}
    branch = ng.train(out=tmp_path / "branch", branch=f"{run}@{START}", quiet=True, **sections).run
    probed = open_probed(run, "cpu", batches=4)
    loss = Forks(STEPS).loss(probed, wide(probed.trained.config.spec.recipe), 1)
    assert branch.final_val_loss == pytest.approx(loss, abs=1e-6)


@pytest.mark.tier("thorough")
def test_sensitivity_measures_each_place_in_nats(run):
    found = ng.sensitivity(run, "mxfp4", batches=1, batch_size=2, fork_steps=1, fork_seeds=2)
    assert {row["unit"] for row in found.rows()} == {"nats"}
    assert all(row["low"] <= row["cost"] <= row["high"] for row in found.rows())
    assert all("estimate" in row for row in found.rows())
    answer = json.loads((run / "sensitivity.json").read_text())
    assert -1 <= answer["rank_correlation_forward"] <= 1
    assert "mean of 2 forks" in answer["forks"]


@pytest.mark.tier("thorough")
def test_search_adds_up_what_forks_measured(run, tmp_path):
    out, words = tmp_path / "found.toml", {"batches": 1, "batch_size": 2, "keep": ()}
    found = ng.search(run, ["mxfp4", "bf16"], 0.5, out, fork_steps=1, fork_seeds=2, **words)
    recipe, probed = ng.load_recipe(out), open_probed(run, "cpu", batches=1, batch_size=2)
    own = probed.trained.config.spec.recipe
    narrow = {
        (layer, gemm): only_in(own, layer, dict.fromkeys(places, cast("mxfp4")))
        for layer in probed.layers
        for gemm in GEMMS
        if (places := [p for p in recipe.casts if p.startswith(gemm) and is_narrow(recipe, layer, p)])
    }
    gaps = Forks(1, 2).gaps(probed, narrow)
    mean = statistics.fmean(sum(gap[seed] for gap in gaps.values()) for seed in (1, 2))
    assert found.answer["measured"]["mean"] == pytest.approx(mean, abs=1e-12)


def is_narrow(recipe, layer, place):
    block = int(layer.split(".")[1]) if layer.startswith("blocks.") else None
    return recipe.for_layer([(layer, block)], 1).casts[place].name == "mxfp4"


#: Keys of `sensitivity`, and the words that refuse them.
REFUSED = [
    ({"fork_steps": 0}, "of 1 or more"),
    ({"fork_steps": 2, "fork_seeds": 0}, "of 1 or more"),
    ({"exact": True, "fork_steps": 2}, "choose one"),
]


@pytest.mark.parametrize(("keys", "words"), REFUSED)
def test_forks_without_steps_or_seeds_or_with_another_way_are_refused(run, keys, words):
    with pytest.raises(UserError, match=words):
        ng.sensitivity(run, "mxfp4", **keys)
