"""The estimate that `train` and `plan` make: every recipe that ships, on every way to divide a run in two."""

import pytest

from narrowgauge.distributed import ParallelDims
from narrowgauge.recipes import recipe_names
from narrowgauge.simulate import estimate_step
from narrowgauge.simulate.step import simulate_step
from narrowgauge.training import make_config
from support.covering import covering, properties_of

KINDS = ("tensor", "context", "shard", "pipeline")
COVERING = covering({name: properties_of(name) for name in recipe_names()}, {kind: [kind] for kind in KINDS})
# Two processes divide every dimension and the tokens into multiples of 128, the largest block of a recipe.
MODEL = {
    "name": "debug",
    "dim": 256,
    "heads": 2,
    "kv_heads": 2,
    "ffn_dim": 512,
    "layers": 2,
    "vocab_size": 256,
}


@pytest.mark.tier("thorough", keep=5)
@pytest.mark.parametrize(("recipe", "kind"), COVERING)
def test_every_recipe_has_an_estimate_on_two_processes(recipe, kind):
    config = make_config(
        {
            "model": MODEL,
            "data": {"sequence_length": 256},
            "training": {"batch_size": 4, "micro_batch_size": 2},
            "recipe": {"name": recipe},
            "parallel": {kind: 2},
        }
    )
    step = estimate_step(config, ParallelDims(**{kind: 2}))
    assert step.memory.device["weights"] > 0
    assert step.memory.peak > step.memory.state
    assert sum(step.sent.values()) > 0


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", ["bf16", "msamp-o2"])
@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(pipeline=2, shard=2),
        ParallelDims(pipeline=2, tensor=2),
        ParallelDims(pipeline=4, shard=2),
        ParallelDims(pipeline=2, shard=2, chunks=2),
    ],
    ids=lambda dims: f"{dims.text} chunks {dims.chunks}",
)
def test_few_micro_batches_tell_what_all_of_a_pipeline_send_and_keep(recipe, dims):
    config = make_config(
        {
            "model": MODEL | {"layers": 4},
            "data": {"sequence_length": 256},
            "training": {"batch_size": 24 * dims.data, "micro_batch_size": 2},
            "recipe": {"name": recipe},
        }
    )
    estimated = estimate_step(config, dims)
    ranks = (0, dims.size - dims.size // dims.pipeline)
    whole = [simulate_step(config, 12, dims, rank) for rank in ranks]
    heaviest = max(whole, key=lambda step: step.memory.peak)
    assert estimated.memory == heaviest.memory
    assert estimated.sent == heaviest.sent[-1] - heaviest.sent[0]
