"""Elements of given ranks of a bf16 tensor: two passes over it, each a histogram of one byte.

The bits of a number, turned so that they are ordered as numbers are, are its key. The first pass counts the
keys by their high byte, `choose` finds the byte in which each rank lies, the second pass counts the low bytes
of the keys that have that high byte. NaN has the largest key. Counts are sums of integers, so that the order
of the programs does not matter.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels.triton.launch import launch

BLOCK, TILES = 4096, 8
BINS = tl.constexpr(256)


@triton.jit
def _keys(x, at, inside):
    """Keys 0 .. 0xFFFF in the order of the numbers; 0xFFFF for NaN and outside."""
    bits = tl.load(x + at, inside, 0).to(tl.int32) & 0xFFFF
    key = tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)
    return tl.where(((bits & 0x7FFF) > 0x7F80) | (inside == 0), 0xFFFF, key)


@triton.jit
def _count(counts, byte, counted):
    """Add the histogram of the bytes that are counted; the others are taken for 255 and subtracted."""
    bins = tl.arange(0, BINS)
    found = tl.histogram(tl.where(counted, byte, 255), BINS)
    found -= tl.where(bins == 255, tl.sum(1 - counted.to(tl.int32), 0), 0)
    tl.atomic_add(counts + bins, found, mask=found != 0)


@triton.jit
def count_bytes(x, counts, state, n, IS_HIGH: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """The histogram of high bytes, or of the low bytes under each of the two high ones in `state`."""
    for i in range(TILES):
        at = (tl.program_id(0).to(tl.int64) * TILES + i) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        key = _keys(x, at, inside)
        if IS_HIGH:
            _count(counts, key >> 8, inside)
        else:
            _count(counts + BINS, key & 255, inside & (key >> 8 == tl.load(state)))
            _count(counts + 2 * BINS, key & 255, inside & (key >> 8 == tl.load(state + 1)))


@triton.jit
def choose(counts, state, found, low, high, IS_HIGH: tl.constexpr):
    """The bin of each rank: to `state` with the rank within it, or with that the number to `found`."""
    bins = tl.arange(0, BINS)
    for j in tl.static_range(2):
        if IS_HIGH:
            count = tl.load(counts + bins)
            rank = high if j else low
        else:
            count = tl.load(counts + (j + 1) * BINS + bins)
            rank = tl.load(state + 2 + j)
        is_below = tl.cumsum(count, 0) <= rank
        chosen = tl.sum(is_below.to(tl.int32), 0)
        if IS_HIGH:
            tl.store(state + j, chosen)
            tl.store(state + 2 + j, rank - tl.sum(tl.where(is_below, count, 0), 0))
        else:
            key = tl.load(state + j) * 256 + chosen
            bits = tl.where(key >= 0x8000, key - 0x8000, 0xFFFF - key)
            tl.store(found + j, tl.where(bits == 0x8000, 0, bits).to(tl.int16))  # -0 is +0


def launch_ranked(x: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """The elements of two ranks (from 0, ascending) of contiguous bf16 numbers: 0-dim each."""
    n = x.numel()
    counts = torch.zeros(3 * 256 + 4, dtype=torch.int32, device=x.device)
    counts, state = counts[: 3 * 256], counts[3 * 256 :]
    found = torch.empty(2, dtype=torch.int16, device=x.device)
    bits, grid = x.view(torch.int16), (triton.cdiv(n, BLOCK * TILES),)
    options: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
    for is_high in (True, False):
        launch(
            count_bytes, grid, bits, counts, state, n,
            updates="counts", IS_HIGH=is_high, BLOCK=BLOCK, TILES=TILES, **options,
        )  # fmt: skip
        launch(
            choose, (1,), counts, state, found, low, high,
            updates="state", writes="found", IS_HIGH=is_high, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    numbers = found.view(torch.bfloat16)
    return numbers[0], numbers[1]
