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

In a single process on a CPU, C (`quantization/passes/layers.c`) computes RMSNorm of an fp32 stream into bf16:
the same operations, each rounded as there, in two passes, between which torch adds up rows and tokens in its
own order. Bytes per element, without torch's sums: 20 forward, plain 40; 34 backward, plain 98.

Legend: M tokens (all axes but the last), D dim.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from narrowgauge.kernels.dispatch import use_kernels
from narrowgauge.quantization.passes.build import struct
from narrowgauge.quantization.passes.in_c import call, computes_layer
from narrowgauge.system.devices import is_shape_only
from narrowgauge.system.second_derivative import FirstOrderFunction

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
) -> tuple[Tensor, Tensor]:
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
        s = x + delta in torch's dtype for that sum (x itself without a delta), and its norm y.
    """
    if not use_kernels(x) or x.shape[-1] > WIDEST or torch.float64 in (weight_D.dtype, out_dtype):
        if _is_for_c(x, delta, weight_D, kind, out_dtype):
            s, y = _AddNormInC.apply(x, delta, weight_D, eps)
            return s, y
        s = x if delta is None else x + delta
        return s, reference(s, weight_D, bias_D, eps, kind, out_dtype)
    from narrowgauge.kernels.triton.norm import AddNorm

    s, y = AddNorm.apply(x, delta, weight_D, bias_D, eps, kind, out_dtype, keeps_terms)
    return s, y


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


class _AddNormInC(FirstOrderFunction):
    """`add_norm` of RMSNorm on a CPU, for an fp32 stream and bf16 values -> (s, y)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x, delta = x.contiguous(), None if delta is None else delta.contiguous()
        squares, stream = torch.empty_like(x), x if delta is None else torch.empty_like(x)
        _pass("norm_squares", x, x=x, delta=delta, stream=stream, first=squares)
        scale = squares.mean(-1, keepdim=True).add_(eps).rsqrt_()
        y = torch.empty_like(x, dtype=torch.bfloat16)
        _pass("norm_result", x, x=stream, weight=weight_D, scale=scale, y=y)
        ctx.save_for_backward(stream, weight_D, scale)
        ctx.has_delta = delta is not None
        ctx.set_materialize_grads(False)
        return stream, y

    @staticmethod
    def backward(ctx: Any, above: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        stream, weight_D, scale = ctx.saved_tensors
        if dy is None:
            ddelta = above.bfloat16() if above is not None and ctx.has_delta else None
            return above, ddelta, None, None
        above, dy = None if above is None else above.contiguous(), dy.contiguous()
        of_weight, of_row = torch.empty_like(stream), torch.empty_like(stream)
        given = {"x": stream, "weight": weight_D, "scale": scale, "dy": dy}
        _pass("norm_terms", stream, **given, first=of_weight, second=of_row)
        dweight_D = of_weight.sum(tuple(range(stream.ndim - 1)))
        slope = of_row.sum(-1, keepdim=True).mul_(-0.5).mul_(scale.pow(3)).div_(stream.shape[-1])
        dx = of_row  # its sum is known
        ddelta = torch.empty_like(dy) if ctx.has_delta else None
        _pass("norm_gradient", stream, **given, slope=slope, above=above, stream=dx, y=ddelta)
        return dx, ddelta, dweight_D, None


def _is_for_c(x: Tensor, delta: Tensor | None, weight_D: Tensor, kind: str, out_dtype: torch.dtype) -> bool:
    """Whether C computes a norm on a CPU; it has the bits of `reference` and of its derivative."""
    narrow = {out_dtype, torch.bfloat16 if delta is None else delta.dtype}
    is_usual = kind == "rms" and narrow == {torch.bfloat16} and x.dtype == weight_D.dtype == torch.float32
    return is_usual and computes_layer(x, weight_D, *(() if delta is None else (delta,)))


def _pass(name: str, like: Tensor, **tensors: Tensor | None) -> None:
    """Call a pass over the tokens of a tensor."""
    if is_shape_only(like):
        return
    pointers = {key: None if x is None else x.data_ptr() for key, x in tensors.items()}
    rows = like.numel() // like.shape[-1]
    call(name, struct("Norm")(dim=like.shape[-1], **pointers), rows, like.numel())
