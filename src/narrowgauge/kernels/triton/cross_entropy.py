"""Cross entropy of rows of logits: one read for the losses, one read and one write for the gradients.

`_losses` has one program per row, which loops over the vocabulary and keeps for each of its BLOCK lanes the
largest logit so far and the sum of exponentials relative to it; lanes are combined once, at the end, so a
block needs no exchange between threads. `_gradients` is elementwise, one program per row and block; each
element is read and written by the same thread, so it may work in place.

BLOCK = 4096 over 8 warps: 16 logits per thread, two 16-byte loads in flight, and 48 registers for logits,
lane maxima and sums. A vocabulary needs 12 to 38 such blocks. The memory time of a logit equals about 13
instructions on an H200, or 27 where it is also written: so the exponential is `tl.exp`, whose error (4e-6
relative at an exponent of -50) is far below that of a bf16 value, instead of torch's.

Legend: T rows, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels.dispatch import in_rows
from narrowgauge.kernels.triton.arithmetic import narrow, wide
from narrowgauge.kernels.triton.launch import cdiv, launch, tl, triton

BLOCK = 4096
WARPS = 8


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
    z, y, factor, loss, stats, rows, width, stride,
    ignored: tl.constexpr, twice_z_loss: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of a row; with a `factor` also its gradients, written over the logits."""
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
    if factor is not None:
        times = tl.load(factor)
        for start in range(0, width, BLOCK):
            at = start + lane
            x_L = wide(tl.load(z + at, mask=at < width, other=float("-inf")))
            d_L = _gradient(x_L, at, top, total, target, width, times, ignored, twice_z_loss)
            tl.store(z + at, narrow(d_L, z.dtype.element_ty), mask=at < width)


@triton.jit
def _gradients(
    z, y, stats, factor, out, rows, width, stride, out_stride,
    ignored: tl.constexpr, twice_z_loss: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_L = wide(tl.load(z + row * stride + lane, mask=lane < width, other=float("-inf")))
    top, total, target = tl.load(stats + row), tl.load(stats + rows + row), tl.load(y + row)
    d_L = _gradient(x_L, lane, top, total, target, width, tl.load(factor), ignored, twice_z_loss)
    tl.store(out + row * out_stride + lane, narrow(d_L, out.dtype.element_ty), mask=lane < width)


def losses(
    z_TV: Tensor, y_T: Tensor, ignored: int | None, factor: Tensor | None = None, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The loss of each row, fp32 [T], and the statistics of each row, fp32 [2, T].

    The statistics are the largest logit and the sum of exponentials relative to it. Rows need not be adjacent
    (`stride`). An id outside the vocabulary that is not `ignored` gives NaN.

    With a `factor`, the gradients of `write_gradients` are written over `z_TV`, whose rows are contiguous:
    the program that has just read a row reads it a second time, so most of it comes from a cache.
    """
    assert factor is None or z_TV.stride(1) == 1
    z_TV, y_T = in_rows(z_TV), y_T.contiguous()
    rows, width = z_TV.shape
    loss_T = torch.empty(rows, dtype=torch.float32, device=z_TV.device)
    stats_2T = torch.empty(2, rows, dtype=torch.float32, device=z_TV.device)
    launch(
        _losses, (rows,), z_TV, y_T, factor, loss_T, stats_2T, rows, width, z_TV.stride(0),
        writes="loss stats", updates="" if factor is None else "z", **_options(ignored, z_loss),
    )  # fmt: skip
    return loss_T, stats_2T


def write_gradients(
    z_TV: Tensor, y_T: Tensor, stats_2T: Tensor, factor: Tensor, ignored: int | None,
    out_TV: Tensor, z_loss: float = 0.0,
) -> None:  # fmt: skip
    """Write (softmax(z) (1 + 2 c s) - [v = y]) * factor to `out_TV`, whose rows are contiguous.

    s is the row's log-sum-exp, c is `z_loss`.
    """
    z_TV, y_T = in_rows(z_TV), y_T.contiguous()
    rows, width = z_TV.shape
    assert out_TV.stride(1) == 1 or width == 1
    writes, updates = ("", "out") if out_TV is z_TV else ("out", "")
    launch(
        _gradients, (rows, cdiv(width, BLOCK)),
        z_TV, y_T, stats_2T, factor, out_TV, rows, width, z_TV.stride(0), out_TV.stride(0),
        writes=writes, updates=updates, **_options(ignored, z_loss),
    )  # fmt: skip


def _options(ignored: int | None, z_loss: float) -> dict[str, Any]:
    twice_z_loss = 2 * z_loss if z_loss else None
    return {"ignored": ignored, "twice_z_loss": twice_z_loss, "BLOCK": BLOCK, "num_warps": WARPS}
