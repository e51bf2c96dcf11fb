"""FP4's outlier handling (arXiv 2501.17116): quantiles, rows with separate outliers, the slope of rounding.

**Elements of given ranks** of a bf16 tensor need two passes over it, each a histogram of one byte. An
element's key is its bit pattern, transformed so that keys are ordered as values are. The first pass counts
the keys by their high byte, `choose` finds the byte in which each rank lies, and the second pass counts the
low bytes of the keys with that high byte. NaN has the largest key. Counts are integer sums, so the order of
the programs does not matter.

**A row** belongs to one program. It reads the row for its amax, and again, from a cache, to round it or to
compute the slope of rounding at each element (`quantization.estimator_slope`). The clamped remainder is
written in bf16. It is a difference of two bf16 values, which is exact in bf16 up to twice the limit
(Sterbenz); a larger element keeps its eight bits.
"""

from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels.triton import rounding
from narrowgauge.kernels.triton.arithmetic import INFINITE, INTERPRETED, magnitude, narrow, wide
from narrowgauge.kernels.triton.launch import cdiv, launch, libdevice, next_power_of_2, tl, triton
from narrowgauge.quantization import Cast

BLOCK, TILES = 4096, 8
COLUMNS = 1024  # that a program processes at once
BINS = tl.constexpr(256)


@triton.jit
def _keys(x, at, inside):
    """Keys 0 .. 0xFFFF in the order of the values; 0xFFFF for NaN and out of bounds."""
    bits = tl.load(x + at, inside, 0).to(tl.int32) & 0xFFFF
    key = tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)
    return tl.where(((bits & 0x7FFF) > 0x7F80) | (inside == 0), 0xFFFF, key)


@triton.jit
def _count(counts, byte, counted):
    """Add the histogram of the bytes that are counted; the others are counted as 255 and subtracted."""
    bins = tl.arange(0, BINS)
    found = tl.histogram(tl.where(counted, byte, 255), BINS)
    found -= tl.where(bins == 255, tl.sum(1 - counted.to(tl.int32), 0), 0)
    tl.atomic_add(counts + bins, found, mask=found != 0, sem="relaxed")


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
    """Find the bin of each rank: to `state` with the rank within it, or with that the value to `found`."""
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
    """The elements of two ranks (from 0, ascending) of contiguous bf16 values: 0-dim each."""
    n = x.numel()
    counts = torch.zeros(3 * 256 + 4, dtype=torch.int32, device=x.device)
    counts, state = counts[: 3 * 256], counts[3 * 256 :]
    found = torch.empty(2, dtype=torch.int16, device=x.device)
    bits, grid = x.view(torch.int16), (cdiv(n, BLOCK * TILES),)
    for is_high in (True, False):
        launch(
            count_bytes, grid, bits, counts, state, n,
            updates="counts", IS_HIGH=is_high, BLOCK=BLOCK, TILES=TILES, num_warps=8,
        )  # fmt: skip
        launch(
            choose, (1,), counts, state, found, low, high,
            updates="state", writes="found", IS_HIGH=is_high, num_warps=1,
        )  # fmt: skip
    numbers = found.view(torch.bfloat16)
    return numbers[0], numbers[1]


@triton.jit
def _row(x, k, K, low, high, CLAMPS: tl.constexpr):
    """(part of a row as float32, the same clamped); zeros beyond its end."""
    whole = wide(tl.load(x + k, k < K, 0.0))
    if not CLAMPS:
        return whole, whole
    clamped = tl.where(whole < low, low, whole)  # keeps NaN
    clamped = tl.where(clamped > high, high, clamped)
    return whole, tl.where(k < K, clamped, 0.0)


@triton.jit
def _row_scale(
    x, K, low, high, TK: tl.constexpr, CLAMPS: tl.constexpr, AIM: tl.constexpr, POWER_OF_TWO: tl.constexpr
):
    """(whether all of a row is finite, encode, decode or NaN), one value each."""
    bits = tl.zeros((TK,), tl.int32)
    for start in range(0, K, TK):
        bits = tl.maximum(bits, magnitude(_row(x, start + tl.arange(0, TK), K, low, high, CLAMPS)[1]))
    largest = tl.max(bits, 0) + tl.zeros((1,), tl.int32)
    if CLAMPS:  # NaN limits make the whole row NaN
        largest = tl.where(low == low, tl.where(high == high, largest, INFINITE), INFINITE)
    return rounding.scale_under(largest, AIM, POWER_OF_TWO)


@triton.jit
def cast_rows(
    x, low, high, out, rest, scales, K, x_R,
    CLAMPS: tl.constexpr, CUTS: tl.constexpr,
    TK: tl.constexpr, AIM: tl.constexpr, POWER_OF_TWO: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """The elements of a row in units of its scale, and with CUTS the clamped remainder."""
    row = tl.program_id(0).to(tl.int64)
    x, out, rest = x + row * x_R, out + row * K, rest + row * K
    low, high = wide(tl.load(low)), wide(tl.load(high))
    finite, encode, decode = _row_scale(x, K, low, high, TK, CLAMPS, AIM, POWER_OF_TWO)
    tl.store(scales + row + tl.arange(0, 1), decode)
    for start in range(0, K, TK):
        k = start + tl.arange(0, TK)
        whole, clamped = _row(x, k, K, low, high, CLAMPS)
        scaled = tl.where(finite, clamped, 0.0) * encode
        n, e, sign = rounding.to_grid(scaled, 0.0, G)
        tl.store(out + k, narrow(rounding.value_of(n, e, sign, G), out.dtype.element_ty), k < K)
        if CUTS:
            tl.store(rest + k, narrow(whole - clamped, rest.dtype.element_ty), k < K)


@triton.jit
def _power(x, exponent: tl.constexpr):
    if INTERPRETED:
        return tl.exp(tl.log(x) * exponent)
    else:
        return libdevice.pow(x, tl.full(x.shape, exponent, tl.float32))


@triton.jit
def slope_of_rows(
    w, dw, out, K, w_R, ESTIMATOR_K: tl.constexpr, CAP: tl.constexpr,
    TK: tl.constexpr, AIM: tl.constexpr, POWER_OF_TWO: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """dw times the slope of rounding at each element of a row of weights."""
    row = tl.program_id(0).to(tl.int64)
    w, dw, out = w + row * w_R, dw + row * K, out + row * K
    finite, encode, _ = _row_scale(w, K, 0.0, 0.0, TK, False, AIM, POWER_OF_TWO)
    for start in range(0, K, TK):
        k = start + tl.arange(0, TK)
        t = tl.minimum(tl.abs(wide(tl.load(w + k, k < K, 0.0)) * encode), G[rounding.MAX])
        e = tl.maximum(t.to(tl.int32, bitcast=True) & 0x7F800000, (G[rounding.EMIN] + 127) << 23)
        t = t * (0x7F000000 - e + (G[rounding.M] << 23)).to(tl.float32, bitcast=True)  # in units of d, exact
        u = tl.abs((t - tl.floor(t)) * 2.0 - 1.0)
        slope = tl.math.div_rn(_power(u, 1 / ESTIMATOR_K - 1), tl.full(u.shape, ESTIMATOR_K, tl.float32))
        slope = tl.where(finite, tl.minimum(slope, CAP), float("nan"))
        tl.store(out + k, wide(tl.load(dw + k, k < K, 0.0)) * slope, k < K)


def _row_options(x: Tensor, cast: Cast) -> dict[str, Any]:
    columns = min(COLUMNS, next_power_of_2(x.shape[1]))
    grid = rounding.grid_of(cast.element, cast.rounding)
    return {"TK": columns, "AIM": cast.aim, "POWER_OF_TWO": cast.power_of_two, "G": grid}


def launch_rows(
    x: Tensor, cast: Cast, limits: tuple[Tensor, Tensor] | None, cuts: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(elements in units of their row's scale, bf16; scales, fp32, one per row; clamped remainder, bf16).

    Args:
        x: A matrix whose rows are contiguous.
        cast: A cast with fp32 scales of rows that rounds to nearest.
        limits: The two limits of the clamp, 0-dim bf16; None clamps nothing.
        cuts: Whether to return the clamped remainder.
    """
    R, K = x.shape
    out = torch.empty((R, K), dtype=torch.bfloat16, device=x.device)
    rest = torch.empty_like(out) if cuts else None
    scales = torch.empty(R, dtype=torch.float32, device=x.device)
    low, high = (x, x) if limits is None else limits
    launch(
        cast_rows, (R,), x, low, high, out, out if rest is None else rest, scales, K, x.stride(0),
        writes="out rest scales", CLAMPS=limits is not None, CUTS=cuts, **_row_options(x, cast),
    )  # fmt: skip
    return out, scales, rest


def launch_slope(w: Tensor, dw: Tensor, cast: Cast) -> Tensor:
    """dw times the slope of rounding w, fp32; both are contiguous along rows, dw throughout."""
    out = torch.empty(w.shape, dtype=torch.float32, device=w.device)
    launch(
        slope_of_rows, (len(w),), w, dw, out, w.shape[1], w.stride(0),
        writes="out", ESTIMATOR_K=cast.estimator_k, CAP=cast.estimator_cap, **_row_options(w, cast),
    )  # fmt: skip
    return out
