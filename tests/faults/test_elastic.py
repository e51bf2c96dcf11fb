"""B. Another number of ranks, another mesh: the same state to the bit.

The tokens of each rank: data/loading/test_sample_order.py; the losses: tests/distributed.
"""

import math

import pytest

from support.fault_runs import WIDE, assert_same_bits, newest, state, stop_in
from support.fault_table import case

# 12 sequences a step: 1, 2, 3 and 4 ranks have as many each.
BATCH = {"training.batch_size": 12, "training.micro_batch_size": 1, "checkpoint.every": 1000}
ODD = {"model.dim": 40, "model.heads": 4, "model.kv_heads": 2, "model.ffn_dim": 56}
FSDP, BOTH = ("--parallel.shard", "4"), ("--parallel.shard", "2", "--parallel.tensor", "2")


def goes_through(runs, out, changes, meshes):
    """A run trains 3 steps on the first mesh, then stands still on each of the others: one step in which
    nothing may move, its gradient being no number, and a save. A mesh is (ranks, more words)."""
    before = None
    for step, (ranks, mesh) in enumerate(meshes, start=3):
        spoil = [{"kind": "gradient", "factor": math.nan, "steps": [step]}] if before else []
        ended = runs.start([*runs.words(changes), *mesh], out, ranks, [*spoil, stop_in(step)]).wait()
        assert set(ended.codes) == {75}, ended.err
        assert newest(out).name == f"step-{step}"
        now = state(newest(out), "model", "optimizer")  # weights, masters, moments and their scales
        before = before or now
        assert_same_bits(now, before)


def on(*counts):
    return [(count, ()) for count in counts]


@case("B1")  # each commit: checkpoint/store/test_ranks.py
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4", "msamp-o2"])
def test_the_state_is_the_same_bits_on_any_number_of_ranks(runs, out, recipe):
    goes_through(runs, out, WIDE | BATCH | {"recipe.name": recipe}, on(2, 1, 3, 4, 2))


@case("B2", tier="thorough")
@pytest.mark.tier("nightly", keep=1)
@pytest.mark.parametrize("recipe", ["mxfp8", "msamp-o2", "fp8-block", "nvfp4"])
def test_dimensions_that_divide_into_nothing(runs, out, recipe):
    """A block is of the global tensor: shards of 40 / 3 rows leave its grid where it was."""
    goes_through(runs, out, BATCH | ODD | {"recipe.name": recipe}, on(3, 1))


@case("B4", tier="thorough")
def test_between_sharding_and_sharding_with_tensor_parallelism(runs, out):
    changes = BATCH | {"recipe.name": "mxfp8", "model.kv_heads": 4}  # whole blocks on each of two
    goes_through(runs, out, changes, [(4, FSDP), (4, BOTH)])
