"""Plans of mixtures of experts."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from narrowgauge.bench.linear_layers import linear_layers
from narrowgauge.bench.work import work_of_passes
from narrowgauge.cluster import load_cluster
from narrowgauge.cluster.plan.estimate import estimate
from narrowgauge.distributed import ParallelDims
from narrowgauge.simulate import Memory, StepEstimate
from narrowgauge.simulate.memory import CLASSES
from narrowgauge.training import make_config
from narrowgauge.training.step.build_model import build_model

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


@pytest.mark.parametrize(("recipe", "casts_of_a_weight"), [("fp8", 1), ("mxfp8", 2)])
def test_a_process_casts_the_weights_of_its_own_experts(recipe, casts_of_a_weight):
    """One of the processes that experts are divided over makes each; all else is as without them."""
    alone, divided = (work_of_passes(config(recipe), True, ranks) for ranks in (1, 4))
    spared = alone.operands - divided.operands
    assert {operand.source for operand in spared} == {"fp32"}  # none of tokens
    micro_batches, experts = 4, 2 * 8 * 3 * 128 * 64
    assert spared.total() == micro_batches * casts_of_a_weight * experts * 3 / 4
    assert (alone.gemms, alone.moved["loss"]) == (divided.gemms, divided.moved["loss"])


def test_a_plan_of_divided_experts_takes_less_time_for_casts():
    cluster, given = load_cluster("h200"), config("mxfp8")
    step = StepEstimate(Memory(dict.fromkeys(CLASSES, 0), {}, 1), {})
    plain, divided = (estimate(given, ParallelDims(shard=4, expert=n), cluster, step) for n in (1, 4))
    assert divided.casts < plain.casts
    assert divided.products <= plain.products, "larger products of each expert read its weights less often"


@pytest.mark.parametrize("pattern", ["*.experts.3.down", "*.gate_up"])
def test_layers_are_counted_once_where_experts_are_alike(pattern):
    """A rule for one expert takes all of them apart; what is counted is the same."""
    spec = config("mxfp8").spec
    spec = replace(spec, recipe=spec.recipe.in_high_precision([pattern]))
    modules = build_model(spec, torch.device("meta")).named_modules()
    whole = Counter(_kind(m) for _, m in modules if isinstance(m, torch.nn.Linear))
    layers = [layer for _, layer in linear_layers(spec)]
    assert Counter(map(_kind, layers)) == whole
    assert (len(set(map(id, layers))) == len(layers)) == (pattern == "*.experts.3.down")


def _kind(layer):
    size = layer.out_features, layer.in_features
    return size, tuple(sorted((place, cast.name) for place, cast in layer.spec.casts.items()))
