"""Norms by rows: a program holds a whole row in registers, so that it is read once.

A row of D values is a block of the next power of two, with 8 per thread (16 where D is 8192): 16-byte loads
from both fp32 and bf16. According to the assembler for an H100 the forward pass then has 32 to 48 registers
per thread, so nothing else limits the threads of a multiprocessor. The backward pass, which holds x, dy, the
weight, the stream's gradient and one or two sums, has 63 to 80 (126 at 8192): at a width of 1536 or 4096 half
of the threads that a multiprocessor can hold.
"""

from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels.triton.arithmetic import magnitude, narrow, wide
from narrowgauge.kernels.triton.launch import cdiv, launch, next_power_of_2, tl, triton

#: Programs of the backward pass, and so rows of partial sums: as many as an H100 holds at once for Llama's
#: widths. With 16,384 tokens they write and read 0.25 bytes per element, on top of the 16 that must be moved.
#: The number determines the order of summation, so it does not depend on the GPU.
PROGRAMS = 512


@triton.jit
def norm_forward(
    x_ptr,
    delta_ptr,
    weight_ptr,
    bias_ptr,
    stream_ptr,
    y_ptr,
    mean_ptr,
    scale_ptr,
    amax_ptr,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: x + delta and its norm. Without `mean_ptr` it is RMSNorm."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    at = row * D + cols
    x = wide(tl.load(x_ptr + at, inside, 0))
    if delta_ptr is not None:
        total = narrow(x + wide(tl.load(delta_ptr + at, inside, 0)), stream_ptr.dtype.element_ty)
        tl.store(stream_ptr + at, total, inside)
        x = wide(total)
    if mean_ptr is not None:
        mean = tl.math.div_rn(tl.sum(x, 0), D * 1.0)
        tl.store(mean_ptr + row, mean)
        x = tl.where(inside, x - mean, 0.0)
    variance = tl.math.div_rn(tl.sum(x * x, 0), D * 1.0)
    scale = tl.math.div_rn(1.0, tl.math.sqrt_rn(variance + eps))
    tl.store(scale_ptr + row, scale)
    y = x * scale * wide(tl.load(weight_ptr + cols, inside, 0))
    if bias_ptr is not None:
        y += wide(tl.load(bias_ptr + cols, inside, 0))
    y = narrow(y, y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, inside)
    tl.atomic_max(amax_ptr, tl.max(tl.where(inside, magnitude(y), 0), 0), sem="relaxed")


@triton.jit
def norm_backward(
    dy_ptr,
    dstream_ptr,
    stream_ptr,
    delta_ptr,
    weight_ptr,
    mean_ptr,
    scale_ptr,
    dx_ptr,
    ddelta_ptr,
    dweight_ptr,
    dbias_ptr,
    amax_ptr,
    rows,
    rows_per_program,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some rows in turn: the gradients of x and delta, and partial sums for weight and bias.

    With `delta_ptr` the stream is recomputed as the fp32 sum of the two. Without `ddelta_ptr` the gradient of
    delta, if there is one, is that of x.
    """
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    weight = wide(tl.load(weight_ptr + cols, inside, 0))
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    amax = 0
    first = program.to(tl.int64) * rows_per_program
    for i in range(0, tl.minimum(rows_per_program, rows - first)):
        row = first + i
        at = row * D + cols
        dy = wide(tl.load(dy_ptr + at, inside, 0))
        x = wide(tl.load(stream_ptr + at, inside, 0))
        if delta_ptr is not None:
            x += wide(tl.load(delta_ptr + at, inside, 0))
        scale = tl.load(scale_ptr + row)
        if mean_ptr is not None:
            x = tl.where(inside, x - tl.load(mean_ptr + row), 0.0)
        x *= scale
        dweight += dy * x
        dbias += dy
        dy *= weight
        dx = dy - x * tl.math.div_rn(tl.sum(dy * x, 0), D * 1.0)
        if mean_ptr is not None:
            dx -= tl.math.div_rn(tl.sum(dy, 0), D * 1.0)
        dx *= scale
        if dstream_ptr is not None:
            dx += wide(tl.load(dstream_ptr + at, inside, 0))
        ddelta = narrow(dx, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + at, ddelta, inside)
        if ddelta_ptr is not None:
            ddelta = narrow(dx, ddelta_ptr.dtype.element_ty)
            tl.store(ddelta_ptr + at, ddelta, inside)
        if amax_ptr is not None:
            amax = tl.maximum(amax, tl.max(tl.where(inside, magnitude(ddelta), 0), 0))
    if amax_ptr is not None:
        tl.atomic_max(amax_ptr, amax, sem="relaxed")
    tl.store(dweight_ptr + program.to(tl.int64) * D + cols, dweight, inside)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + program.to(tl.int64) * D + cols, dbias, inside)


def _blocks(D: int) -> dict[str, Any]:
    block = next_power_of_2(D)
    return {"D": D, "BLOCK": block, "num_warps": max(1, min(16, block // 256))}


def launch_forward(
    x: Tensor,
    delta: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor | None,
    stream: Tensor | None,
    y: Tensor,
    mean_M: Tensor | None,
    scale_M: Tensor,
    amax: Tensor,
    eps: float,
) -> None:
    """Fill `stream` (if there is a delta), `y` and the fp32 statistics of each row; [..., D] contiguous.

    Raises `amax` to max |y|.
    """
    D = len(weight_D)
    launch(
        norm_forward,
        (len(scale_M),),
        x,
        delta,
        weight_D,
        bias_D,
        stream,
        y,
        mean_M,
        scale_M,
        amax.view(torch.int32),
        eps,
        writes="stream_ptr y_ptr mean_ptr scale_ptr",
        updates="amax_ptr",
        **_blocks(D),
        enable_fp_fusion=False,
    )


def launch_backward(
    dy: Tensor,
    dstream: Tensor | None,
    stream: Tensor,
    delta: Tensor | None,
    weight_D: Tensor,
    mean_M: Tensor | None,
    scale_M: Tensor,
    dx: Tensor,
    ddelta: Tensor | None,
    amax: Tensor | None,
    with_bias: bool,
) -> list[Tensor]:
    """Fill `dx` and `ddelta`, and raise `amax` to max |ddelta|, or max |dx| without one; [..., D] contiguous.

    With a `delta` the normalized stream is `stream` + `delta`, in fp32.

    Returns:
        The fp32 gradient of the weight, and that of the bias if `with_bias`.
    """
    M, D = len(scale_M), len(weight_D)
    rows_per_program = cdiv(M, PROGRAMS)
    programs = cdiv(M, rows_per_program)
    sums_2PD = scale_M.new_empty(1 + with_bias, programs, D)
    launch(
        norm_backward,
        (programs,),
        dy,
        dstream,
        stream,
        delta,
        weight_D,
        mean_M,
        scale_M,
        dx,
        ddelta,
        sums_2PD[0],
        sums_2PD[1] if with_bias else None,
        None if amax is None else amax.view(torch.int32),
        M,
        rows_per_program,
        writes="dx_ptr ddelta_ptr dweight_ptr dbias_ptr",
        updates="amax_ptr",
        **_blocks(D),
        enable_fp_fusion=False,
    )
    return list(sums_2PD.sum(1))
