"""The order of samples: which window of the tokens is sample n?

The order is a pure function of the seed and the sample number, counted from the start of the run. There is no
state and no generator to advance: a resumed run, another number of devices and another batch size all see the
same samples in the same order.

    window(n) = P[seed, epoch](n mod M),    epoch = n div M

M windows make an epoch, and P is a permutation of 0 .. M-1 for each seed and epoch. A shuffled list would
hold M integers in memory; a *keyed permutation* computes each value on its own.

**The network.** Choose a = ceil(sqrt(M)) and b = ceil(M / a), so that a b >= M. Write an integer i < a b as
a pair: l = i div b < a and r = i mod b < b. With hash functions F_0, F_1, ...,

    l <- (l + F_0(r)) mod a
    r <- (r + F_1(l)) mod b
    l <- (l + F_2(r)) mod a      ... eight such rounds

Each round can be undone (subtract what was added; the other half is unchanged), so for any F the network is a
bijection of 0 .. ab-1. This is a Feistel network with halves of unequal size and mod instead of xor (Black
and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).

**Cycle walking.** The domain exceeds M by less than a. If the result is >= M, apply the network again until
it is < M. This follows the cycle of the bijection past the values outside the range, so the result is a
bijection of 0 .. M-1 (same paper).

**The hash** mix is the finaliser of SplitMix64 (`formats.splitmix.splitmix64`):

    key = mix(mix(seed) + epoch)
    F_j(h) = mix(h xor mix(key + j)) mod a, or mod b

This is good enough to shuffle data, but not cryptographically secure.

**Several sources.** Every 65536 consecutive samples form a block. Source i gets s_i samples of each block,
its *share*: its weight in 65536ths. The keyed permutation of the block's numbers assigns the samples by slot:

    slot(n) = P[seed, block](n mod 65536),   block = n div 65536
    source i has the slots  s_0 + ... + s_(i-1)  up to  s_0 + ... + s_i - 1
    its own number of sample n is  k = block * s_i + (slot - s_0 - ... - s_(i-1))

Sample n is then window(k) in the order of source i. Every block has exactly the weights, each window of a
source occurs once in an epoch of that source, and the result is still a function of seed and n. A single
source has the order above, unchanged.
"""

from collections.abc import Iterator, Sequence
from itertools import count as count_from
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from narrowgauge.formats.splitmix import splitmix64

#: Samples in a block, of which each source gets its share.
BLOCK = 65536

_ROUNDS = 8
_SEED_STEP = 0x9E3779B97F4A7C15  # difference between the seeds of two sources
_U64 = NDArray[np.uint64]


def samples(seed: int, first: int, count: int, num_windows: int) -> NDArray[np.int64]:
    """The windows of samples first .. first + count - 1 of a run, int64 in [0, num_windows), shape (count,).

    `seed` is any integer, taken mod 2**64; every epoch of `num_windows` samples visits each window once.
    """
    assert first >= 0
    assert count >= 0
    assert num_windows >= 1
    return _windows(seed, np.arange(first, first + count, dtype=np.int64), num_windows)


def mixed_samples(
    seed: int, first: int, count: int, num_windows: Sequence[int], shares: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The source of samples first .. first + count - 1 of a run, and the window in it; two arrays (count,).

    Source i has `num_windows[i]` windows and `shares[i]` of every `BLOCK` samples.
    """
    assert len(num_windows) == len(shares) >= 1
    if len(shares) == 1:
        window_N = samples(seed, first, count, num_windows[0])
        return np.zeros_like(window_N), window_N
    assert sum(shares) == BLOCK
    end_S = np.cumsum(shares)
    slot_N = samples(seed, first, count, BLOCK)
    source_N = np.searchsorted(end_S, slot_N, side="right")
    block_N = np.arange(first, first + count, dtype=np.int64) // BLOCK
    share_N = np.asarray(shares, dtype=np.int64)[source_N]
    number_N = block_N * share_N + slot_N - (end_S[source_N] - share_N)
    window_N = np.empty(count, dtype=np.int64)
    for source, windows in enumerate(num_windows):
        of_N = source_N == source
        window_N[of_N] = _windows(seed + (source + 1) * _SEED_STEP, number_N[of_N], windows)
    return source_N, window_N


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """The weights as parts of `BLOCK`, each at least 1; the largest part absorbs the rounding error."""
    assert weights
    assert all(0 < weight < float("inf") for weight in weights)
    total = sum(weights)
    shares = [max(1, round(weight / total * BLOCK)) for weight in weights]
    shares[shares.index(max(shares))] += BLOCK - sum(shares)
    assert min(shares) >= 1
    return tuple(shares)


def first_samples(
    step: int, batch_size: int, micro_batch_size: int, rank: int = 0, world: int = 1, skipped: int = 0
) -> Iterator[int]:
    """The first sample of each micro-batch of a rank, without end, from step `step` (counted from 0).

    A step takes `batch_size` consecutive samples, divided equally among the `world` ranks in rank order.
    `skipped` is the number of earlier samples that the run has left out.
    """
    local_size = batch_size // world
    assert batch_size == local_size * world
    assert local_size % micro_batch_size == 0
    for begin in count_from(step * batch_size + skipped + rank * local_size, batch_size):
        yield from range(begin, begin + local_size, micro_batch_size)


def _windows(seed: int, number_N: NDArray[np.int64], num_windows: int) -> NDArray[np.int64]:
    """The window at each position of the order, with `num_windows` windows in an epoch."""
    epoch_N, position_N = np.divmod(number_N, num_windows)
    seed_1 = np.array([seed % 2**64], dtype=np.uint64)
    key_N = splitmix64(splitmix64(seed_1) + epoch_N.astype(np.uint64))
    return _permute(position_N.astype(np.uint64), key_N, num_windows).astype(np.int64)


def _permute(value_N: _U64, key_N: _U64, size: int) -> _U64:
    """The keyed permutation of 0 .. size-1: the network, applied until the value is in range."""
    left_size = isqrt(size - 1) + 1
    right_size = -(-size // left_size)
    value_N = _network(value_N, key_N, left_size, right_size)
    while (outside_N := value_N >= size).any():
        value_N[outside_N] = _network(value_N[outside_N], key_N[outside_N], left_size, right_size)
    return value_N


def _network(value_N: _U64, key_N: _U64, left_size: int, right_size: int) -> _U64:
    """One pass of the network: a bijection of 0 .. left_size * right_size - 1 for each key."""
    a, b = np.uint64(left_size), np.uint64(right_size)
    left_N, right_N = value_N // b, value_N % b
    for j in range(0, _ROUNDS, 2):
        left_N = (left_N + splitmix64(right_N ^ splitmix64(key_N + np.uint64(j))) % a) % a
        right_N = (right_N + splitmix64(left_N ^ splitmix64(key_N + np.uint64(j + 1))) % b) % b
    return left_N * b + right_N
