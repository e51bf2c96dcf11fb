"""RMSNorm and LayerNorm of the residual stream, fused with the preceding sum and the stream's gradient.

    s = x + delta
    rms      n = s / sqrt(mean(s^2) + eps)
    layer    n = (s - mean(s)) / sqrt(mean((s - mean(s))^2) + eps)
    y = n * weight + bias                                   rounded once, to `out_dtype`

    dn = dy * weight
    ds = (dn - n * mean(dn * n) [- mean(dn), layer]) / sqrt(...)  + the incoming gradient of s
    dweight = sum over tokens of dy * n                     dbias = sum over tokens of dy

The statistics are fp32, each mean a sum over the row in registers. `s` is returned together with `y`, so that
its gradient is added in the same backward pass.

Bytes per element, for an fp32 stream and 2-byte deltas and outputs:

    forward    separate sum 4+2+4, norm 4+4 (fp32 out), rounding 4+2        24
               fused    x 4, delta 2; s 4, y 2                              12
    backward   separate widen dy 2+4, norm 4+4+4 and again 4+4 for the
                        weight, sum 4+4+4, rounding for delta 4+2           44
               fused    dy 2, s 4, ds 4; dx 4, ddelta 2                     16   and the partial sums

For the backward pass s is kept, 4 bytes per element. Where x is kept anyway, because an earlier norm reads it
again, keeping x and delta is enough, and s is recomputed: 2 bytes are kept, and 2 more are read.

The sums over tokens are partial sums of each program, added by a second launch in an order that depends only
on the shape. The kernel also computes max |y| and max |ddelta| (`kernels.amax`).

Legend: M tokens (all axes but the last), D dim.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from narrowgauge.kernels.amax import KnownAmax, known_amax, new_amax, send_back
from narrowgauge.kernels.dispatch import use_kernels
from narrowgauge.second_derivative import once_differentiable

#: The widest row that fits the registers of one program in the backward pass.
WIDEST = 8192


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    kind: Literal["rms", "layer"],
    out_dtype: torch.dtype,
    keeps_terms: bool = False,
) -> tuple[Tensor, Tensor, KnownAmax | None]:
    """Add to the residual stream, and normalize the sum.

    Args:
        x: [..., D], the stream, in any float dtype.
        delta: [..., D], the addend, or None.
        weight_D: [D], in any float dtype.
        bias_D: [D], for "layer" only.
        eps: Added to the variance.
        kind: "rms" or "layer".
        out_dtype: The dtype of the norm.
        keeps_terms: Whether a kernel keeps x and delta for the backward pass instead of their sum, if delta
            is narrower than an fp32 sum.

    Returns:
        s = x + delta in torch's dtype for that sum (x itself without a delta), its norm y, and max |y| if a
        kernel has computed it, else None.
    """
    if not use_kernels(x) or x.shape[-1] > WIDEST or torch.float64 in (weight_D.dtype, out_dtype):
        s = x if delta is None else x + delta
        return s, reference(s, weight_D, bias_D, eps, kind, out_dtype), None
    s, y, amax = _AddNorm.apply(x, delta, weight_D, bias_D, eps, kind, out_dtype, keeps_terms)
    return s, y, known_amax(y, amax)


def norm(
    x: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    kind: Literal["rms", "layer"],
    out_dtype: torch.dtype,
) -> Tensor:
    """The norm of `x` over its last axis; see `add_norm`."""
    return add_norm(x, None, weight_D, bias_D, eps, kind, out_dtype)[1]


def reference(
    x: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float, kind: str, out_dtype: torch.dtype
) -> Tensor:
    """`norm` in plain torch."""
    x, weight_D = x.float(), weight_D.float()
    if kind == "rms":
        y = nn.functional.rms_norm(x, weight_D.shape, weight_D, eps)
    else:
        bias_D = None if bias_D is None else bias_D.float()
        y = nn.functional.layer_norm(x, weight_D.shape, weight_D, bias_D, eps)
    return y.to(out_dtype)


class _AddNorm(torch.autograd.Function):
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        from narrowgauge.kernels.triton import norm as on_gpu

        stream = None
        if delta is not None:
            delta = delta.contiguous()
            stream = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, delta.dtype), device=x.device)
        weight_D, bias_D = weight_D.contiguous(), None if bias_D is None else bias_D.contiguous()
        y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
        scale_M = torch.empty(x.shape[:-1].numel(), dtype=torch.float32, device=x.device)
        amax = new_amax(x.device)
        mean_M = torch.empty_like(scale_M) if kind == "layer" else None
        on_gpu.launch_forward(x.contiguous(), delta, weight_D, bias_D, stream, y, mean_M, scale_M, amax, eps)
        if stream is None:
            stream = x
        is_shorter = delta is not None and delta.element_size() < stream.element_size()
        if keeps_terms and is_shorter and x.dtype == stream.dtype == torch.float32:
            ctx.save_for_backward(x, delta, weight_D, mean_M, scale_M)
        else:
            ctx.save_for_backward(stream, None, weight_D, mean_M, scale_M)
        ctx.dtypes = x.dtype, None if delta is None else delta.dtype, None if bias_D is None else bias_D.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(amax)
        return stream, y, amax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstream: Tensor | None, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        from narrowgauge.kernels.triton import norm as on_gpu

        x_dtype, delta_dtype, bias_dtype = ctx.dtypes
        stream, delta, weight_D, mean_M, scale_M = ctx.saved_tensors
        stream = stream.contiguous()
        dy = torch.zeros_like(stream) if dy is None else dy.contiguous()
        dstream = None if dstream is None else dstream.contiguous()
        dx = torch.empty_like(stream, dtype=x_dtype)
        ddelta = amax = None
        if delta_dtype is not None:
            is_same = delta_dtype == x_dtype
            ddelta = dx if is_same else torch.empty_like(dx, dtype=delta_dtype)
            amax = None if ddelta.dtype == torch.float32 else new_amax(dx.device)
        dweight_D, *dbias_D = on_gpu.launch_backward(
            *(dy, dstream, stream, delta, weight_D, mean_M, scale_M),
            *(dx, None if ddelta is dx else ddelta, amax, bias_dtype is not None),
        )
        if ddelta is not None and amax is not None:
            send_back(ddelta, amax)
        dbias = dbias_D[0].to(bias_dtype) if dbias_D else None
        return dx, ddelta, dweight_D.to(weight_D.dtype), dbias, None, None, None, None
