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

from narrowgauge.kernels.amax import attach_amax, new_amax
from narrowgauge.kernels.triton.arithmetic import magnitude, narrow, wide
from narrowgauge.kernels.triton.launch import cdiv, launch, next_power_of_2, tl, triton
from narrowgauge.system.second_derivative import FirstOrderFunction

#: Programs of the backward pass, and so rows of partial sums: as many as an H100 holds at once for Llama's
#: widths. With 16,384 tokens they write and read 0.25 bytes per element, on top of the 16 that must be moved.
#: The number determines the order of summation, so it does not depend on the GPU.
PROGRAMS = 512


@triton.jit
def norm_forward(
    x_ptr, delta_ptr, weight_ptr, bias_ptr, stream_ptr, y_ptr, mean_ptr, scale_ptr, amax_ptr, eps,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    dy_ptr, dstream_ptr, stream_ptr, delta_ptr, weight_ptr, mean_ptr, scale_ptr, dx_ptr, ddelta_ptr,
    dweight_ptr, dbias_ptr, amax_ptr, rows, rows_per_program, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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


class AddNorm(FirstOrderFunction):
    """`norm.add_norm` -> (s, y); y and the gradient of delta have their amax attached."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        weight_D: Tensor,
        bias_D: Tensor | None,
        eps: float,
        kind: str,
        out_dtype: torch.dtype,
        keeps_terms: bool,
    ) -> tuple[Tensor, Tensor]:
        """One row of D values for each program."""
        stream, D = None, len(weight_D)
        if delta is not None:
            delta = delta.contiguous()
            stream = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, delta.dtype), device=x.device)
        weight_D, bias_D = weight_D.contiguous(), None if bias_D is None else bias_D.contiguous()
        y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
        scale_M = torch.empty(x.shape[:-1].numel(), dtype=torch.float32, device=x.device)
        amax = new_amax(x.device)
        mean_M = torch.empty_like(scale_M) if kind == "layer" else None
        launch(
            norm_forward, (len(scale_M),),
            x.contiguous(), delta, weight_D, bias_D, stream, y, mean_M, scale_M, amax.view(torch.int32), eps,
            writes="stream_ptr y_ptr mean_ptr scale_ptr", updates="amax_ptr", **_blocks(D),
        )  # fmt: skip
        if stream is None:
            stream = x
        is_shorter = delta is not None and delta.element_size() < stream.element_size()
        if keeps_terms and is_shorter and x.dtype == stream.dtype == torch.float32:
            ctx.save_for_backward(x, delta, weight_D, mean_M, scale_M)
        else:
            ctx.save_for_backward(stream, None, weight_D, mean_M, scale_M)
        ctx.dtypes = x.dtype, None if delta is None else delta.dtype, None if bias_D is None else bias_D.dtype
        ctx.set_materialize_grads(False)
        attach_amax(y, amax)
        return stream, y

    @staticmethod
    def backward(ctx: Any, dstream: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Some rows in turn for each program; what they add to weight and bias is summed afterwards."""
        x_dtype, delta_dtype, bias_dtype = ctx.dtypes
        stream, delta, weight_D, mean_M, scale_M = ctx.saved_tensors
        stream = stream.contiguous()
        dy = torch.zeros_like(stream) if dy is None else dy.contiguous()
        dstream = None if dstream is None else dstream.contiguous()
        dx = torch.empty_like(stream, dtype=x_dtype)
        ddelta = amax = None
        if delta_dtype is not None:
            ddelta = dx if delta_dtype == x_dtype else torch.empty_like(dx, dtype=delta_dtype)
            amax = None if ddelta.dtype == torch.float32 else new_amax(dx.device)
        M, D, has_bias = len(scale_M), len(weight_D), bias_dtype is not None
        rows_per_program = cdiv(M, PROGRAMS)
        programs = cdiv(M, rows_per_program)
        sums_2PD = scale_M.new_empty(1 + has_bias, programs, D)
        launch(
            norm_backward, (programs,),
            dy, dstream, stream, delta, weight_D, mean_M, scale_M, dx, None if ddelta is dx else ddelta,
            sums_2PD[0], sums_2PD[1] if has_bias else None, None if amax is None else amax.view(torch.int32),
            M, rows_per_program,
            writes="dx_ptr ddelta_ptr dweight_ptr dbias_ptr", updates="amax_ptr", **_blocks(D),
        )  # fmt: skip
        dweight_D, *dbias_D = sums_2PD.sum(1)
        if ddelta is not None and amax is not None:
            attach_amax(ddelta, amax)
        dbias = dbias_D[0].to(bias_dtype) if dbias_D else None
        return dx, ddelta, dweight_D.to(weight_D.dtype), dbias, None, None, None, None
