"""Two linear layers with SwiGLU between them as one function, where a GPU multiplies FP8 codes.

    z_MD = down(swiglu(gate_up(x_MD)))          Legend: M tokens, D inputs and outputs, F inner, G = 2F

Both layers multiply FP8 codes under one scale per tensor (`fp8_scaling`). The input of the second layer is
not kept: the backward pass computes its codes again, in the same pass as those of SwiGLU's gradient
(`kernels.activation`).
"""

from functools import cache
from typing import Any, Literal

import torch

from narrowgauge.kernels.activation import swiglu_by_kernel, swiglu_codes, swiglu_gradient_codes
from narrowgauge.kernels.amax import amax_of_gradient
from narrowgauge.kernels.recompute import is_discarding, is_unread, once
from narrowgauge.nn.gemm import QuantizedOperand, multiply
from narrowgauge.nn.linear_function import autocast_disabled
from narrowgauge.nn.operands import LayerSpec, Operands, keep_operand
from narrowgauge.nn.weight import GatheredWeight
from narrowgauge.quantization import Cast
from narrowgauge.quantization import cast as named_cast
from narrowgauge.second_derivative import once_differentiable

_FP8 = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")


class _SwigluMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MD: torch.Tensor,
        w_GD: torch.Tensor,
        v_DF: torch.Tensor,
        both: tuple[Operands, Operands],
    ) -> torch.Tensor:
        first, second = both
        compute, is_kept = first.layer.compute, not is_discarding()
        x = first.of(x_MD, "fprop.x", -1, is_kept, first.input_amax)
        w = first.of_weight(w_GD, "fprop.w", -1, both=is_kept)
        v = second.of_weight(v_DF, "fprop.w", -1, both=is_kept)
        gate_up_MG = multiply(x, w, compute, fast=True)
        if is_unread():
            y_fact, z_MD = once(lambda: _swiglu(gate_up_MG, second)[1]), x_MD.new_empty(len(x_MD), len(v_DF))
        else:
            y, y_fact = _swiglu(gate_up_MG, second)
            y_fact = once(lambda: y_fact)
            z_MD = multiply(y, v, compute, fast=True)
        kept: list[torch.Tensor | None] = []
        for name, operand, weight in (("x", x, None), ("w", w, w_GD), ("v", v, v_DF)):
            is_gathered = isinstance(weight, GatheredWeight)  # again for the backward pass
            tensors, restore = ((weight, None, None), None) if is_gathered else keep_operand(operand)
            kept += tensors
            setattr(ctx, f"restore_{name}", restore)
        ctx.save_for_backward(gate_up_MG, y_fact, *kept)
        ctx.both, ctx.dtypes = both, (w_GD.dtype, v_DF.dtype)
        return z_MD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz_MD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with autocast_disabled(dz_MD.device.type):
            return _backward(ctx, dz_MD)


def _backward(ctx: Any, dz_MD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gate_up_MG, y_fact, *kept = ctx.saved_tensors
    first, second = ctx.both
    compute, cast, y_cast = first.layer.compute, first.layer.casts["dgrad.dy"], second.layer.casts["wgrad.x"]
    x = ctx.restore_x(*kept[:3]).transposed()
    w, v = (
        restore(*operand).transposed() if restore else operands.of_weight(operand[0], "dgrad.w", 0)
        for operands, restore, operand in (
            (first, ctx.restore_w, kept[3:6]),
            (second, ctx.restore_v, kept[6:]),
        )
    )
    dz = second.of(dz_MD, "dgrad.dy", -1, True, amax_of_gradient(dz_MD))
    dy_MF = multiply(dz, v, compute)
    delayed = first.delayed_scale("dgrad.dy") if cast.amax.history else None
    codes = swiglu_gradient_codes(dy_MF, gate_up_MG, y_fact, cast.element, y_cast.element, delayed)
    del dy_MF
    y = QuantizedOperand(codes.y_FM, codes.y_scale, dz.tensor_scale, y_cast)
    dv = multiply(dz.transposed(), y, compute)
    stream, (_, (to_w, _), (to_v, _)) = second.gradient_stream(dv), ctx.next_functions
    dv_DF = second.weight.left_for_autograd(dv, stream, ctx.dtypes[1], to_v)
    del dv
    dg = QuantizedOperand(codes.grad_M2F, codes.grad_scale, dz.tensor_scale, cast, codes.grad_2FM)
    dx_MD = multiply(dg, w, compute)
    dw = multiply(dg.transposed(), x, compute)
    dw_GD = first.weight.left_for_autograd(dw, first.gradient_stream(dw), ctx.dtypes[0], to_w)
    return dx_MD, dw_GD, dv_DF, None


def _swiglu(gate_up_MG: torch.Tensor, operands: Operands) -> tuple[QuantizedOperand, torch.Tensor]:
    """The SwiGLU output as the second layer's operand, plus what backward needs to rebuild it.

    That is its amax, or its scales under delayed scaling.
    """
    cast = operands.layer.casts["fprop.x"]
    if cast.amax.history:
        codes, scales = swiglu_codes(gate_up_MG, cast.element, operands.delayed_scale("fprop.x"))
        return QuantizedOperand(codes, scales[1], torch.ones_like(scales[1]), cast), scales
    y_MF, amax = swiglu_by_kernel(gate_up_MG)
    y = operands.of(y_MF, "fprop.x", -1, amax=amax)
    assert isinstance(y, QuantizedOperand)
    return y, amax


def fp8_scaling(layer: LayerSpec) -> Literal["", "current", "delayed"]:
    """The kind of scales if all operands are FP8 codes under one scale per tensor, each the same in both its
    matmuls, and all of one kind; else ""."""
    casts = layer.casts
    pairs = (("fprop.x", "wgrad.x"), ("fprop.w", "dgrad.w"), ("dgrad.dy", "wgrad.dy"))
    is_alike = all(casts[a] == casts[b] and _is_fp8(casts[a]) for a, b in pairs)
    kinds = {bool(casts[a].amax.history) for a, _ in pairs}
    if not (is_alike and len(kinds) == 1 and layer.native and isinstance(layer.saved, str)):
        return ""
    return "delayed" if kinds.pop() else "current"


@cache
def _is_fp8(cast: Cast) -> bool:
    """Whether a cast is FP8 under one scale per tensor, from any step."""
    return cast.having(history=0, margin=0, history_algorithm="max") in map(named_cast, _FP8)


#: (x_MD, the first weight, the second, the operands of both layers) to z_MD, all in one compute dtype.
swiglu_mlp = _SwigluMlp.apply
