"""MS-EDEN: scales corrected for what rounding did to a group; as by hand, unbiased, and refused."""

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.formats import random_stream
from narrowgauge.quantization import QuantContext, make_cast, quantize_in_context
from narrowgauge.quantization.oracle import reference_quantize
from narrowgauge.quantization.stages.hadamard import transform
from quantization.by_hand import SMALL, assert_as_by_hand, inputs, integers

EDEN = {"cast": "nvfp4", "correct": "projection", "scale_rounding": "stochastic", "scale_target": 256}
E5M3 = {"element": "e2m1", "block": 8, "scale": "e5m3", "correct": "projection"}
TABLES = {
    "blocks by themselves": EDEN,
    "with ones for zeros": EDEN | {"zero_scale": "one", "headroom": 1.012},
    "to the nearest": EDEN | {"scale_rounding": "nearest-even"},
    "ue5m3": E5M3,
    "four over six first": EDEN | {"candidates": [6, 4], "choose": "mae"},
}


@pytest.mark.tier("thorough", keep=("blocks by themselves-0",))
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", TABLES)
def test_equals_the_oracle_bit_for_bit(name, axis):
    for kind in ("normal", "wide", "zeros", "ragged") if axis == -1 else ("ragged",):
        assert_as_by_hand(inputs(SMALL)[kind], make_cast(TABLES[name]), axis, key=7)


def test_a_group_is_that_of_the_transform():
    """A tensor of small integers, whose transform is exact."""
    g = torch.Generator().manual_seed(1)
    x = torch.randint(-8, 9, (6, 96), generator=g).float()
    signs, stream = 1 - 2 * torch.randint(0, 2, (64,), generator=g), random_stream(0, 0, 3)
    c = make_cast(EDEN | {"hadamard": 64, "signs": "random"})
    q = quantize_in_context(x, c, -1, QuantContext(stream, signs))
    draws = integers(stream.of_scales().uniform(q.blocks.grid))
    hand = reference_quantize(x.numpy(), c, -1, signs=signs.tolist(), scale_draws=draws)
    np.testing.assert_array_equal(q.scales.numpy().ravel(), np.array(list(hand.scales.values()), np.float32))


def effective_bits(table, count):
    """-log2 of the relative error of the mean of some draws, transformed back."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    total, c = torch.zeros(32, 64, dtype=torch.float64), make_cast(table)
    for i in range(count):
        signs = 1 - 2 * (random_stream(1, i, 0).bits((64,)) & 1)
        q = quantize_in_context(x, c, -1, QuantContext(random_stream(2, i, 0), signs))
        total += q.dequantize().double() @ transform(64, signs, total).T
    return -torch.log2((total / count - x).norm() / x.norm()).item()


@pytest.mark.tier("thorough")
def test_the_mean_of_many_is_the_tensor():
    """Quartet II's averaging test: unbiased is half a bit for each doubling of the draws."""
    shared = {"hadamard": 64, "signs": "random"}
    eden = EDEN | shared | {"headroom": 16 / 17 / 0.93, "zero_scale": "one"}
    nearest = {"cast": "nvfp4"} | shared
    assert 3.0 < effective_bits(eden, 1) < 3.6
    gains = [effective_bits(table, 256) - effective_bits(table, 1) for table in (eden, nearest)]
    assert gains[0] > 3.5
    assert gains[0] > gains[1] + 0.15  # to the nearest, what is biased stays


MISTAKES = {
    "correct = 'projection', but it belongs to scales in bf16, e4m3": {
        "cast": "mxfp4",
        "correct": "projection",
    },
    "correct = 'projection', but it needs blocks of one row": EDEN | {"cast": "nvfp4-2d"},
    "correct = 'projection', but it needs blocks of one row that": EDEN | {"hadamard": 16, "block": 32},
    "unknown correction 'eden'": EDEN | {"correct": "eden"},
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_keys_that_contradict_each_other(sentence):
    with pytest.raises(UserError, match=sentence):
        ng.quantize(torch.ones(32, 32), MISTAKES[sentence])
