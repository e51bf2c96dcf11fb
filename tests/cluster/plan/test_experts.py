"""Plans of mixtures of experts."""

import pytest

from narrowgauge.cluster import load_cluster
from narrowgauge.cluster.plan.estimate import estimate
from narrowgauge.distributed import ParallelDims
from narrowgauge.simulate import Memory, StepEstimate
from narrowgauge.simulate.memory import CLASSES
from narrowgauge.training import make_config

MODEL = {"name": "moe-debug", "dim": 128, "layers": 2, "ffn_dim": 64, "vocab_size": 256, "experts": 8}


def config(recipe, experts=8, **training):
    return make_config(
        {
            "model": MODEL | {"experts": experts},
            "data": {"sequence_length": 128},
            "training": {"batch_size": 8, "micro_batch_size": 2} | training,
            "recipe": {"name": recipe},
        }
    )


@pytest.mark.tier("thorough")
def test_a_plan_of_divided_experts_takes_less_time_for_casts():
    cluster, given = load_cluster("h200"), config("mxfp8")
    step = StepEstimate(Memory(dict.fromkeys(CLASSES, 0), {}, 1), {})
    plain, divided = (estimate(given, ParallelDims(shard=4, expert=n), cluster, step) for n in (1, 4))
    assert divided.casts < plain.casts
    assert divided.products <= plain.products, "larger products of each expert read its weights less often"
