"""The estimate that `train` and `plan` make: every recipe that ships, on every way to divide a run in two."""

import pytest

from narrowgauge.distributed import ParallelDims
from narrowgauge.recipes import recipe_names
from narrowgauge.trainer.simulate import estimate_step
from narrowgauge.trainer.simulate.step import simulate_step
from support.covering import covering, properties_of
from support.runs import config_of

KINDS = ("tensor", "context", "shard", "pipeline")
COVERING = covering({name: properties_of(name) for name in recipe_names()}, {kind: [kind] for kind in KINDS})
# Two processes divide every dimension and the tokens into multiples of 128, the largest block of a recipe.
MODEL = {"dim": 256, "heads": 2, "kv_heads": 2, "ffn_dim": 512, "layers": 2, "vocab_size": 256}


@pytest.mark.tier("thorough", keep=4, nightly=8)
@pytest.mark.parametrize(("recipe", "kind"), COVERING)
def test_every_recipe_has_an_estimate_on_two_processes(recipe, kind):
    step = estimate_step(config_of(recipe, MODEL, 256, {kind: 2}, batch_size=4), ParallelDims(**{kind: 2}))
    assert step.memory.device["weights"] > 0
    assert step.memory.peak > step.memory.state
    assert sum(step.sent.values()) > 0


@pytest.mark.tier("thorough", nightly=2)
@pytest.mark.parametrize("recipe", ["msamp-o2", "bf16"])
@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(pipeline=4, shard=2),
        ParallelDims(pipeline=2, shard=2, chunks=2),
        ParallelDims(pipeline=2, tensor=2),
    ],
    ids=lambda dims: f"{dims.text} chunks {dims.chunks}",
)
def test_few_micro_batches_tell_what_all_of_a_pipeline_send_and_keep(recipe, dims):
    values = config_of(recipe, MODEL | {"layers": 4}, 256, batch_size=24 * dims.data)
    estimated = estimate_step(values, dims)
    ranks = (0, dims.size - dims.size // dims.pipeline)
    whole = [simulate_step(values, 12, dims, rank) for rank in ranks]
    heaviest = max(whole, key=lambda step: step.memory.peak)
    assert estimated.memory == heaviest.memory
    assert estimated.sent == heaviest.sent[-1] - heaviest.sent[0]
