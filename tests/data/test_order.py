"""The order of samples: a permutation an epoch, the same however it is asked for, the same for ever."""

from itertools import pairwise
from math import isqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.data import samples

M64 = 2**64 - 1


def mix(z):
    z = (z + 0x9E3779B97F4A7C15) & M64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def slow_sample(seed, n, size):
    """The mathematics of the module's docstring, one sample at a time in whole numbers."""
    epoch, value = divmod(n, size)
    a = isqrt(size) + (isqrt(size) ** 2 < size)
    b = (size + a - 1) // a
    key = mix((mix(seed & M64) + epoch) & M64)
    while True:
        left, right = divmod(value, b)
        for j in range(8):
            if j % 2 == 0:
                left = (left + mix(right ^ mix((key + j) & M64)) % a) % a
            else:
                right = (right + mix(left ^ mix((key + j) & M64)) % b) % b
        value = left * b + right
        if value < size:
            return value


@settings(deadline=None)
@given(
    seed=st.integers(-(2**70), 2**70),
    first=st.integers(0, 10**12),
    count=st.integers(0, 20),
    size=st.integers(1, 40) | st.integers(1, 2**31),
)
def test_the_fast_order_is_the_slow_one(seed, first, count, size):
    assert samples(seed, first, count, size).tolist() == [
        slow_sample(seed, first + i, size) for i in range(count)
    ]


@pytest.mark.parametrize("size", [*range(1, 70), 100, 127, 128, 129, 1000, 4095, 4097, 65_537, 250_000])
def test_every_epoch_meets_every_window_once(size):
    for epoch in (0, 1, 5):
        assert np.array_equal(np.sort(samples(3, epoch * size, size, size)), np.arange(size))


def test_epochs_and_seeds_differ():
    orders = [samples(seed, epoch * 1000, 1000, 1000) for seed in (0, 1, -1, 2**63) for epoch in range(4)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).mean() < 0.02  # 1 in 1000 is what chance gives


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 500), max_size=20), seed=st.integers(0, 99))
def test_batches_put_together_are_the_same_whatever_their_size(cuts, seed):
    whole = samples(seed, 0, 500, 37)
    edges = [0, *sorted(cuts), 500]
    parts = [samples(seed, a, b - a, 37) for a, b in pairwise(edges)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_small_orders_are_all_about_equally_likely():
    """Of 4! orders of four windows, each should come in 1/24 of 24000 epochs: chi-squared with 23 degrees."""
    orders = samples(11, 0, 4 * 24_000, 4).reshape(-1, 4)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert ((counts - 1000) ** 2 / 1000).sum() < 23 + 5 * np.sqrt(46)


def test_neighbours_in_the_order_are_not_neighbours_in_the_text():
    order = samples(0, 0, 100_000, 100_000).astype(float)
    for lag in (1, 2, 316, 317):  # 317 is the side of the network
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02
    # Each tenth of the run draws from each tenth of the text alike.
    table, _, _ = np.histogram2d(np.arange(100_000), order, bins=10)
    assert ((table - 1000) ** 2 / 1000).sum() < 81 + 5 * np.sqrt(162)


def test_the_order_never_changes_between_versions():
    """A run that is resumed under a later version has to meet the samples that it would have met."""
    assert samples(0, 0, 12, 10).tolist() == [5, 1, 0, 3, 9, 6, 4, 8, 2, 7, 4, 0]
    assert samples(1234, 10**9, 5, 1_000_003).tolist() == [812892, 452525, 593843, 516912, 567087]
