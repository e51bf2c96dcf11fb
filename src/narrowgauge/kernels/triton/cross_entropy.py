"""Cross entropy of rows of logits: one read for the losses, one read and one write for the gradients.

`_losses` has one program per row, which loops over the vocabulary and keeps for each of its BLOCK lanes the
largest logit so far and the sum of exponentials relative to it; lanes are combined once, at the end, so a
block needs no exchange between threads. `_gradients` is elementwise, one program per row and block; each
element is read and written by the same thread, so it may work in place.

BLOCK = 4096 over 8 warps: 16 logits per thread, two 16-byte loads in flight, and 48 registers for logits,
lane maxima and sums. A vocabulary needs 12 to 38 such blocks. The memory time of a logit equals about 13
instructions on an H200, or 27 where it is also written: so the exponential is `tl.exp`, whose error (4e-6
relative at an exponent of -50) is far below that of a bf16 value, instead of torch's.

`gradient_codes` writes the gradients as FP8 codes along both axes, in square tiles: each logit is read once
and the gradients themselves never exist in memory. Its scale needs their amax in advance. The largest
gradient of a row is that of the target, 1 - p_y, for the other p_v add up to no more; with rounding it can
also be that of the largest logit. `_losses` knows both.

Legend: T rows, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.formats import Format
from narrowgauge.kernels.amax import DelayedScale
from narrowgauge.kernels.triton.activation import EIGHT_WARPS, tile_of
from narrowgauge.kernels.triton.arithmetic import magnitude, narrow, wide
from narrowgauge.kernels.triton.launch import cdiv, launch, tl, triton
from narrowgauge.kernels.triton.swiglu_codes import (
    SQUARE,
    are_converted,
    code_constants,
    codes_of,
    launch_delayed_scale,
    scale_of,
    store_both,
)

BLOCK = 4096
WARPS = 8
#: Instructions of `gradient_codes` per logit, by the assembler for an H100, whose memory takes as long as 29
#: take: if rows of codes begin at multiples of 16 bytes, and if not.
_LANES_OF_CODES = (46, 93)


@triton.jit
def _at_least_finite(top):
    """The maximum to subtract, or 0 for -inf: exp(-inf - 0) is 0, but exp(-inf + inf) is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _gradient(
    x_L, lane, top, total, target, width, factor, ignored: tl.constexpr, twice_z_loss: tl.constexpr
):
    """The gradients of some logits of a row, times `factor`; NaN for an invalid target."""
    p_L = tl.exp(x_L - top) * tl.math.div_rn(1.0, total)  # a division of each would take 13 instructions
    if twice_z_loss is not None:
        p_L = p_L * (1.0 + twice_z_loss * (top + tl.log(total)))
    d_L = tl.where(lane == target, p_L - 1.0, p_L) * factor
    in_vocabulary = (target >= 0) & (target < width)
    d_L = tl.where(in_vocabulary, d_L, float("nan"))
    if ignored is not None:
        d_L = tl.where(target == ignored, 0.0, d_L)
    return d_L


@triton.jit
def _losses(
    z,
    y,
    factor,
    loss,
    stats,
    largest,
    rows,
    width,
    stride,
    ignored: tl.constexpr,
    twice_z_loss: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The loss of a row; with a `factor` also its gradients, written over the logits.

    `largest` is raised to the magnitude of the row's largest gradient under a factor of 1.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    z += row * stride
    top_L = tl.full((BLOCK,), float("-inf"), tl.float32)
    sum_L = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, width, BLOCK):
        x_L = tl.load(z + start + lane, mask=start + lane < width, other=float("-inf"))
        x_L = wide(x_L)
        new_L = tl.maximum(top_L, x_L)
        # Either x or the old maximum is the new one, so one exponential serves both: exp(0) is 1. NaN
        # compares smaller than nothing, and enters the sum; so does the difference of two infinities.
        low_L = tl.where(x_L > top_L, top_L, x_L)
        less_L = tl.exp(low_L - _at_least_finite(new_L))
        sum_L = tl.where(x_L > top_L, sum_L * less_L + 1.0, sum_L + less_L)
        top_L = new_L
    top = tl.max(top_L, 0)
    total = tl.sum(sum_L * tl.exp(top_L - _at_least_finite(top)), 0)
    tl.store(stats + row, top)
    tl.store(stats + rows + row, total)
    target = tl.load(y + row)
    in_vocabulary = (target >= 0) & (target < width)
    z_y = wide(tl.load(z + target, mask=in_vocabulary, other=float("nan")))
    result = tl.log(total) - (z_y - top)
    if ignored is not None:
        result = tl.where(target == ignored, 0.0, result)
    tl.store(loss + row, result)
    if largest is not None:
        p_top = tl.math.div_rn(tl.where(top < float("inf"), 1.0, float("nan")), total)
        p_y = tl.exp(z_y - top) * p_top
        bits = tl.maximum(magnitude(p_y - 1.0), tl.where(z_y < top, magnitude(p_top), 0))
        if ignored is not None:
            bits = tl.where(target == ignored, 0, bits)
        tl.atomic_max(largest, bits, sem="relaxed")
    if factor is not None:
        times = tl.load(factor)
        for start in range(0, width, BLOCK):
            at = start + lane
            x_L = wide(tl.load(z + at, mask=at < width, other=float("-inf")))
            d_L = _gradient(x_L, at, top, total, target, width, times, ignored, twice_z_loss)
            tl.store(z + at, narrow(d_L, z.dtype.element_ty), mask=at < width)


@triton.jit
def _gradients(
    z,
    y,
    stats,
    factor,
    out,
    rows,
    width,
    stride,
    out_stride,
    ignored: tl.constexpr,
    twice_z_loss: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_L = wide(tl.load(z + row * stride + lane, mask=lane < width, other=float("-inf")))
    top, total, target = tl.load(stats + row), tl.load(stats + rows + row), tl.load(y + row)
    d_L = _gradient(x_L, lane, top, total, target, width, tl.load(factor), ignored, twice_z_loss)
    tl.store(out + row * out_stride + lane, narrow(d_L, out.dtype.element_ty), mask=lane < width)


@triton.jit
def gradient_codes(
    z, y, stats, factor, amax, encode, codes, other, scale, rows, width, stride,
    ignored: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, MAX: tl.constexpr, EMIN: tl.constexpr,
    M: tl.constexpr, ZERO: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """FP8 codes of a tile of gradients, along both axes, under the scale of their amax or a known one."""
    row, col, inside = tile_of(rows, width, ROWS, COLS)
    x = wide(tl.load(z + row * stride + col, inside, float("-inf")))
    top, total = tl.load(stats + row, row < rows, 0), tl.load(stats + rows + row, row < rows, 1)
    target = tl.load(y + row, row < rows, 0)
    d = _gradient(x, col, top, total, target, width, tl.load(factor), ignored, None)
    d = narrow(d, z.dtype.element_ty)
    if encode is None:
        times, inverse = scale_of(amax, MAX)
        one = tl.arange(0, 1)
        tl.store(scale + one, inverse, tl.program_id(0) + one == 0)
    else:
        times = tl.load(encode + tl.arange(0, 1))
        inverse = times
    code = codes_of(d, times, inverse, MAX, EMIN, M, ZERO, CONVERTS)
    store_both(code, codes, other, row, col, inside, rows, width)


def losses(
    z_TV: Tensor,
    y_T: Tensor,
    ignored: int | None,
    factor: Tensor | None = None,
    z_loss: float = 0.0,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each row, fp32 [T], and the statistics of each row, fp32 [2, T].

    The statistics are the largest logit and the sum of exponentials relative to it. Rows need not be adjacent
    (`stride`). An id outside the vocabulary that is not `ignored` gives NaN.

    With a `factor`, the gradients of `write_gradients` are written over `z_TV`, whose rows are contiguous:
    the program that has just read a row reads it a second time, so most of it comes from a cache.

    `largest`, 0-dim fp32, is raised to the magnitude of the largest gradient of all rows under a factor of 1
    and without a z-loss.
    """
    assert factor is None or z_TV.stride(1) == 1
    z_TV, y_T = _rows_of(z_TV), y_T.contiguous()
    rows, width = z_TV.shape
    loss_T = torch.empty(rows, dtype=torch.float32, device=z_TV.device)
    stats_2T = torch.empty(2, rows, dtype=torch.float32, device=z_TV.device)
    if rows:
        launch(
            _losses,
            (rows,),
            z_TV,
            y_T,
            factor,
            loss_T,
            stats_2T,
            None if largest is None else largest.view(torch.int32),
            rows,
            width,
            z_TV.stride(0),
            writes="loss stats",
            updates="largest" if factor is None else "largest z",
            ignored=ignored,
            twice_z_loss=2 * z_loss if z_loss else None,
            BLOCK=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return loss_T, stats_2T


def write_gradients(
    z_TV: Tensor,
    y_T: Tensor,
    stats_2T: Tensor,
    factor: Tensor,
    ignored: int | None,
    out_TV: Tensor,
    z_loss: float = 0.0,
) -> None:
    """Write (softmax(z) (1 + 2 c s) - [v = y]) * factor to `out_TV`, whose rows are contiguous.

    s is the row's log-sum-exp, c is `z_loss`.
    """
    z_TV, y_T = _rows_of(z_TV), y_T.contiguous()
    rows, width = z_TV.shape
    assert out_TV.stride(1) == 1 or width == 1
    if rows:
        launch(
            _gradients,
            (rows, cdiv(width, BLOCK)),
            z_TV,
            y_T,
            stats_2T,
            factor,
            out_TV,
            rows,
            width,
            z_TV.stride(0),
            out_TV.stride(0),
            writes="" if out_TV is z_TV else "out",
            updates="out" if out_TV is z_TV else "",
            ignored=ignored,
            twice_z_loss=2 * z_loss if z_loss else None,
            BLOCK=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


class GradientCodes(NamedTuple):
    """FP8 codes (uint8) of the logits' gradient along both axes, and their scale, 0-dim fp32."""

    codes_TV: Tensor
    codes_VT: Tensor
    scale: Tensor


def launch_gradient_codes(
    z_TV: Tensor,
    y_T: Tensor,
    stats_2T: Tensor,
    factor: Tensor,
    largest: Tensor,
    ignored: int | None,
    element: Format,
    delayed: DelayedScale | None = None,
) -> GradientCodes:
    """The codes of `write_gradients` in FP8, of at least one row; `largest` is that of `losses`.

    A product with a positive number and a rounding keep the order of magnitudes, so the amax is `largest`,
    multiplied and rounded as a gradient is. With `delayed` the scale is known, and its amax is raised.
    """
    z_TV, y_T = _rows_of(z_TV), y_T.contiguous()
    rows, width = z_TV.shape
    codes_TV, codes_VT = (z_TV.new_empty(s, dtype=torch.uint8) for s in ((rows, width), (width, rows)))
    amax = (largest * factor.abs()).to(z_TV.dtype).float()
    scale = torch.empty((), dtype=torch.float32, device=z_TV.device)
    launch(
        gradient_codes, (cdiv(rows, SQUARE["ROWS"]) * cdiv(width, SQUARE["COLS"]),),
        z_TV, y_T, stats_2T, factor, amax, None if delayed is None else delayed.encode,
        codes_TV, codes_VT, scale, rows, width, z_TV.stride(0),
        writes="codes other" + " scale" * (delayed is None),
        lanes=_LANES_OF_CODES[width % 16 > 0] * z_TV.numel(), ignored=ignored, **SQUARE,
        **code_constants(element, ""), CONVERTS=are_converted(z_TV.device, element), **EIGHT_WARPS,
    )  # fmt: skip
    return GradientCodes(
        codes_TV, codes_VT, scale if delayed is None else launch_delayed_scale(amax, delayed)[1]
    )


def _rows_of(z_TV: Tensor) -> Tensor:
    return z_TV if z_TV.stride(1) == 1 else z_TV.contiguous()
