"""The record of a parameter: one attribute, attached only where there is something to say, and never lost."""

import copy

import pytest
import torch

from narrowgauge.nn import convert
from narrowgauge.quantization import (
    ShardAxis,
    TensorShard,
    ensure_state,
    full_axis,
    master_or_weight,
    state_of,
    write_weight,
)
from narrowgauge.quantization.state.parameter_state import SMALLEST_NARROW, is_large
from nn.own_loop import through_a_file

K, N = 96, 128
NARROW = ["bf16-sr", "msamp-o1", "msamp-o2", "msamp-o3"]


def layer(of="msamp-o3", index=None):
    torch.manual_seed(0)
    made = convert(torch.nn.Linear(K, N), of)
    if index is not None:
        ensure_state(made.weight).index = index
    return made


def assert_one(layer, index):
    """Parameter and layer have the same record, and the weight shows its values."""
    state = state_of(layer.weight)
    assert state is layer.state_at_rest
    assert state.index == index
    assert torch.equal(layer.weight.float(), state.weight.read())


def test_only_large_matrices_have_narrow_moments():
    """The size of the global tensor decides, not that of a shard."""
    sizes = {(SMALLEST_NARROW,): False, (2, SMALLEST_NARROW // 2): True, (2, SMALLEST_NARROW // 2 - 1): False}
    assert {size: is_large(torch.nn.Parameter(torch.ones(size))) for size in sizes} == sizes
    p = torch.nn.Parameter(torch.ones(1, SMALLEST_NARROW // 2))
    ensure_state(p).shard = TensorShard(
        (ShardAxis(2, ((1, 1),), (object(),)), full_axis(SMALLEST_NARROW // 2))
    )
    assert is_large(p)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8", "nvfp4"])
def test_a_plain_weight_carries_nothing(name):
    """So that other programs read it when it is saved."""
    p = layer(name).weight
    assert vars(p) == {}
    assert torch.equal(through_a_file(p, weights_only=True), p)


@pytest.mark.parametrize("name", NARROW)
def test_a_record_is_all_that_a_weight_carries_and_goes_with_a_copy_and_a_file(name):
    one = layer(name, index=7)
    assert set(vars(one.weight)) == {"narrowgauge", "views", "_is_param"}
    assert set(state_of(one.weight).by_place()) - {"master"} == {"weight", "grad"}
    before = master_or_weight(one.weight).clone()
    two, three = copy.deepcopy(one), through_a_file(one, weights_only=False)
    for each in (one, two, three):
        assert_one(each, 7)
        assert torch.equal(master_or_weight(each.weight), before)
    write_weight(two.weight, torch.zeros(N, K))
    assert torch.equal(master_or_weight(one.weight), before)
