"""The order of samples: a permutation an epoch, the same however it is asked for, the same for ever."""

from itertools import islice
from math import isqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.trainer.data import first_samples, mixed_samples, samples, shares_of

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


def test_every_epoch_meets_every_window_once():
    for size in (*range(1, 40), 127, 128, 129, 4095, 4097, 65_537):
        for epoch in (0, 5):
            assert np.array_equal(np.sort(samples(3, epoch * size, size, size)), np.arange(size)), size


def test_the_order_never_changes_between_versions():
    """A run that is resumed under a later version has to meet the samples that it would have met."""
    assert samples(0, 0, 12, 10).tolist() == [5, 1, 0, 3, 9, 6, 4, 8, 2, 7, 4, 0]
    assert samples(1234, 10**9, 5, 1_000_003).tolist() == [812892, 452525, 593843, 516912, 567087]
    source_N, window_N = mixed_samples(0, 0, 8, [10, 1000], shares_of([0.5, 0.5]))
    assert source_N.tolist() == [0, 0, 0, 1, 1, 1, 0, 1]
    assert window_N.tolist() == [1, 5, 0, 108, 359, 934, 4, 545]


def slow_mixed_sample(seed, n, sizes, shares):
    block = 65536
    slot, source = slow_sample(seed, n, block), 0
    while slot >= shares[source]:
        slot, source = slot - shares[source], source + 1
    own = n // block * shares[source] + slot
    return source, slow_sample(seed + (source + 1) * 0x9E3779B97F4A7C15, own, sizes[source])


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**63),
    first=st.integers(0, 10**10),
    weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=4),
    data=st.data(),
)
def test_the_fast_mixture_is_the_slow_one(seed, first, weights, data):
    sizes = data.draw(st.lists(st.integers(1, 10**6), min_size=len(weights), max_size=len(weights)))
    shares = shares_of(weights)
    source_N, window_N = mixed_samples(seed, first, 5, sizes, shares)
    expected = [slow_mixed_sample(seed, first + i, sizes, shares) for i in range(5)]
    assert list(zip(source_N.tolist(), window_N.tolist(), strict=True)) == expected


def test_every_block_keeps_the_weights_and_every_epoch_of_a_source_is_whole():
    shares, sizes = shares_of([0.7, 0.2, 0.1]), [1000, 700, 6000]
    source_N, window_N = mixed_samples(1, 0, 3 * 65536, sizes, shares)
    for block in np.split(source_N, 3):
        assert np.bincount(block).tolist() == list(shares)
    for source, size in enumerate(sizes):
        counts, mean = np.bincount(window_N[source_N == source], minlength=size), shares[source] * 3 // size
        assert mean <= counts.min() <= counts.max() <= mean + 1


def test_shares_are_all_of_a_block_and_none_is_nothing():
    for weights in ([1], [1, 1, 1], [1e-9, 1], [0.5, 1e9, 3], [1e-300] * 7):
        shares = shares_of(weights)
        assert sum(shares) == 65536
        assert min(shares) >= 1
        exact = np.array(weights) / sum(weights) * 65536
        assert np.abs(np.array(shares) - exact).max() <= len(weights)


@pytest.mark.parametrize(("world", "micro"), [(1, 8), (1, 2), (2, 4), (4, 1), (8, 1)])
def test_ranks_share_a_step_and_any_of_them_can_begin_anywhere(world, micro):
    for step, skipped in ((0, 0), (5, 0), (5, 16)):
        count = 3 * 8 // world // micro
        own = [islice(first_samples(step, 8, micro, rank, world, skipped), count) for rank in range(world)]
        taken = sorted(n + i for firsts in own for n in firsts for i in range(micro))
        assert taken == list(range(8 * step + skipped, 8 * (step + 3) + skipped))
