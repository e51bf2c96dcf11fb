"""The three GEMMs of a linear layer under a recipe, as one autograd function.

Legend: M tokens, K inputs, N outputs.

    forward    y_MN  = fprop.x(x_MK)  @ fprop.w(w_NK).T          blocks along K
    backward   dx_MK = dgrad.dy(dy_MN) @ dgrad.w(w_NK)           blocks along N
               dw_NK = wgrad.dy(dy_MN).T @ wgrad.x(x_MK)         blocks along M

Each `place(tensor)` is what the GEMM sees of the tensor in that place's format (`GemmContext.operand`). An
operand is quantized again for the backward pass, from high precision, because its blocks lie along another
axis there; where they do not (one scale per tensor, square blocks), the same numbers are used twice. A recipe
may say the same of any operand (`dgrad.w = "fprop.w"`): the numbers of the first product as they are, or
rounded once more.

Where x keeps some channels in another cast (`keep_channels`), so may w: y is the sum of a product of the kept
channels and one of the others. Their columns of dw come from operands in that cast, dy's too (`with_kept`).

Two layers with SwiGLU between them are one function where both multiply FP8 codes under one scale a tensor on
a GPU (`fp8_scaling`). The input of the second layer is then not kept: the backward pass makes its codes
again, in the pass in which it makes those of SwiGLU's gradient (`kernels.activation`).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from narrowgauge.kernels.activation import swiglu_codes, swiglu_gradient_codes
from narrowgauge.kernels.amax import amax_of_gradient
from narrowgauge.kernels.gradient_sum import through_rounding
from narrowgauge.kernels.recompute import is_discarding, is_unread, once
from narrowgauge.nn.gemm import RowOperand, add_bias, multiply
from narrowgauge.nn.gemm_context import GemmContext, LayerSpec
from narrowgauge.nn.native import QuantizedOperand
from narrowgauge.nn.observer import evenly
from narrowgauge.nn.saved import keep_input, keep_operand
from narrowgauge.nn.sharded.gathered_weight import GatheredWeight
from narrowgauge.quantization import Cast, QuantContext
from narrowgauge.quantization import cast as named_cast

_FP8 = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None, context: GemmContext
    ) -> torch.Tensor:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        ctx.dtypes = x_MK.dtype, w_NK.dtype, None if bias_N is None else bias_N.dtype
        context.see_input(x_MK)
        # A gathered weight is gathered again for the backward pass, so that nothing of it is kept.
        ctx.reuses_w = context.reuses_w and not isinstance(w_NK, GatheredWeight)
        is_kept = not is_discarding()
        both = needs_dw and context.reuses_x and is_kept
        x = context.operand(x_MK, "fprop.x", -1, both, context.input_amax)
        w = context.weight_operand(w_NK, "fprop.w", -1, both=needs_dx and ctx.reuses_w and is_kept)
        if is_unread() and context.observer is None:
            y_MN, bias_N = x_MK.new_empty(len(x_MK), len(w_NK)), None
        else:
            # A bias is added before the sum is rounded, where that is in fp32.
            is_wide = bias_N is not None and isinstance(x, RowOperand)
            y_MN = multiply(x, w, torch.float32 if is_wide else context.layer.compute, fast=True)
        some_x_RM = None
        if context.observer is not None:
            some_x_RM = evenly(x_MK.T).clone()
            context.observer.product("fprop.y", y_MN, x_MK, context.numbers_of(w_NK))
        if bias_N is not None:
            y_MN = add_bias(y_MN, bias_N)
        kept_x, ctx.restore_x = keep_input(x_MK, x, context)
        kept_w, ctx.restore_w = keep_operand(w) if ctx.reuses_w else ((None, None, None), None)
        has_slope = bool(context.layer.casts["fprop.w"].estimator_k)
        needs_w = not ctx.reuses_w or has_slope or context.observer is not None
        ctx.save_for_backward(w_NK if needs_w else None, *kept_w, *kept_x, some_x_RM)
        ctx.context = context
        return y_MN.to(x_MK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with autocast_disabled(dy_MN.device.type):
            return _backward(ctx, dy_MN)


def _backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    w_NK, *kept, some_x_RM = ctx.saved_tensors
    kept_w, kept_x = kept[:3], kept[3:]
    del kept
    context: GemmContext = ctx.context
    compute, w_cast = context.layer.compute, context.layer.casts["fprop.w"]
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    needs_dx, needs_dw, needs_dbias, _ = ctx.needs_input_grad
    shares_dy = needs_dx and needs_dw and context.shared("dgrad.dy", "wgrad.dy")
    dx_MK = dw_NK = dbias_N = dy = None
    dy_amax = amax_of_gradient(dy_MN)
    if needs_dx:
        dy = context.operand(dy_MN, "dgrad.dy", -1, shares_dy, dy_amax)
        if ctx.reuses_w:
            w = context.again(ctx.restore_w(*kept_w), "dgrad.w")
        elif context.layer.casts["dgrad.w"].of:
            w = context.again(context.weight_operand(w_NK, "fprop.w", -1), "dgrad.w")
        else:
            w = context.weight_operand(w_NK, "dgrad.w", 0)
        dx_MK = multiply(dy, w, compute).to(x_dtype)
        del w, kept_w  # the gradient of the weight may take its memory, unless the graph is retained
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()
        if context.observer is not None:
            context.observer.product("dgrad.dx", dx_MK, dy_MN, context.numbers_of(w_NK).T)
    if needs_dw:
        if context.layer.casts["wgrad.dy"].of:
            dy = context.again(dy or context.operand(dy_MN, "dgrad.dy", -1, amax=dy_amax), "wgrad.dy")
        elif shares_dy and dy is not None:
            dy = dy.transposed()
        else:
            dy = context.operand(dy_MN, "wgrad.dy", 0, amax=dy_amax)
        x = ctx.restore_x(*kept_x)
        if context.reuses_x:
            x = context.again(x, "wgrad.x")
        else:
            amax = context.input_amax if context.layer.saved == "input" else None
            x = context.operand(x.values, "wgrad.x", 0, amax=amax)
        # A sum that lacks the tokens of other processes is not rounded before it is complete.
        is_complete = context.shard("wgrad.x") is None
        dtype = compute if is_complete else torch.float32
        dw_NK = multiply(dy, x, dtype)
        if context.layer.casts["wgrad.dy"].keep_cast and context.layer.casts["wgrad.x"].keep_channels:
            dw_NK = context.with_kept(dw_NK, dy_MN, x, dtype)
        if context.observer is not None:
            context.observer.product("wgrad.dw", dw_NK.T, some_x_RM, dy_MN.T)
        if w_cast.estimator_k:
            w_context = QuantContext(shard=context.shard("fprop.w"))
            dw_NK = through_rounding(dw_NK, context.numbers_of(w_NK), w_cast, w_context)
        dw_NK = None if context.add_gradient(dw_NK) else dw_NK.to(w_dtype)
    if bias_dtype is not None and needs_dbias:
        dbias_N = dy_MN.sum(0, dtype=torch.float32).to(bias_dtype)
    return dx_MK, dw_NK, dbias_N, None


class _SwigluMlp(torch.autograd.Function):
    """down(swiglu(gate_up(x))); legend: M tokens, D inputs and outputs, F numbers between, G = 2F."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: torch.Tensor,
        w_GD: torch.Tensor,
        v_DF: torch.Tensor,
        contexts: tuple[GemmContext, ...],
    ) -> torch.Tensor:
        first, second = contexts
        compute, is_kept = first.layer.compute, not is_discarding()
        x = first.operand(x_MD, "fprop.x", -1, is_kept, first.input_amax)
        w = first.weight_operand(w_GD, "fprop.w", -1, both=is_kept)
        v = second.weight_operand(v_DF, "fprop.w", -1, both=is_kept)
        gate_up_MG = multiply(x, w, compute, fast=True)
        if is_unread():
            y_told, z_MD = once(lambda: _swiglu(gate_up_MG, second)[1]), x_MD.new_empty(len(x_MD), len(v_DF))
        else:
            y, y_told = _swiglu(gate_up_MG, second)
            y_told = once(lambda: y_told)
            z_MD = multiply(y, v, compute, fast=True)
        kept: list[torch.Tensor | None] = []
        for name, operand, weight in (("x", x, None), ("w", w, w_GD), ("v", v, v_DF)):
            is_gathered = isinstance(weight, GatheredWeight)  # again for the backward pass
            tensors, restore = ((weight, None, None), None) if is_gathered else keep_operand(operand)
            kept += tensors
            setattr(ctx, f"restore_{name}", restore)
        ctx.save_for_backward(gate_up_MG, y_told, *kept)
        ctx.contexts, ctx.dtypes = contexts, (w_GD.dtype, v_DF.dtype)
        return z_MD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz_MD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with autocast_disabled(dz_MD.device.type):
            return _mlp_backward(ctx, dz_MD)


def _mlp_backward(ctx: Any, dz_MD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gate_up_MG, y_told, *kept = ctx.saved_tensors
    first, second = ctx.contexts
    compute, cast, y_cast = first.layer.compute, first.layer.casts["dgrad.dy"], second.layer.casts["wgrad.x"]
    x = ctx.restore_x(*kept[:3]).transposed()
    w, v = (
        restore(*operand).transposed() if restore else context.weight_operand(operand[0], "dgrad.w", 0)
        for context, restore, operand in (
            (first, ctx.restore_w, kept[3:6]),
            (second, ctx.restore_v, kept[6:]),
        )
    )
    dz = second.operand(dz_MD, "dgrad.dy", -1, True, amax_of_gradient(dz_MD))
    dy_MF = multiply(dz, v, compute)
    delayed = first.delayed_scale("dgrad.dy") if cast.history else None
    codes = swiglu_gradient_codes(dy_MF, gate_up_MG, y_told, cast.element, y_cast.element, delayed)
    del dy_MF
    y = QuantizedOperand(codes.y_FM, codes.y_scale, dz.tensor_scale, y_cast)
    dv = multiply(dz.transposed(), y, compute)
    dv_DF = None if second.add_gradient(dv) else dv.to(ctx.dtypes[1])
    del dv
    dg = QuantizedOperand(codes.grad_M2F, codes.grad_scale, dz.tensor_scale, cast, codes.grad_2FM)
    dx_MD = multiply(dg, w, compute)
    dw = multiply(dg.transposed(), x, compute)
    dw_GD = None if first.add_gradient(dw) else dw.to(ctx.dtypes[0])
    return dx_MD, dw_GD, dv_DF, None


def _swiglu(gate_up_MG: torch.Tensor, context: GemmContext) -> tuple[QuantizedOperand, torch.Tensor]:
    """SwiGLU's result as an operand of the second layer, and what a backward pass is told of it: its largest
    magnitude, or under delayed scaling its scales."""
    cast = context.layer.casts["fprop.x"]
    if cast.history:
        codes, scales = swiglu_codes(gate_up_MG, cast.element, context.delayed_scale("fprop.x"))
        return QuantizedOperand(codes, scales[1], torch.ones_like(scales[1]), cast), scales
    from narrowgauge.kernels.triton.activation import launch_swiglu

    y_MF, amax = launch_swiglu(gate_up_MG.contiguous())
    y = context.operand(y_MF, "fprop.x", -1, amax=amax)
    assert isinstance(y, QuantizedOperand)
    return y, amax


def fp8_scaling(layer: LayerSpec) -> Literal["", "current", "delayed"]:
    """The kind of scales, where all operands are codes in FP8 under one scale a tensor, each the same in both
    its products, and all of one kind; else an empty string."""
    casts = layer.casts
    pairs = (("fprop.x", "wgrad.x"), ("fprop.w", "dgrad.w"), ("dgrad.dy", "wgrad.dy"))
    is_alike = all(casts[a] == casts[b] and _is_fp8(casts[a]) for a, b in pairs)
    kinds = {bool(casts[a].history) for a, _ in pairs}
    if not (is_alike and len(kinds) == 1 and layer.native and isinstance(layer.saved, str)):
        return ""
    return "delayed" if kinds.pop() else "current"


@cache
def _is_fp8(cast: Cast) -> bool:
    """Whether a cast is FP8 under one scale a tensor, whichever step that is of."""
    return replace(cast, history=0, margin=0, history_algorithm="max") in map(named_cast, _FP8)


def autocast_disabled(device: str) -> AbstractContextManager[Any]:
    """A context without autocast, because the recipe decides the dtypes (the meta device has no autocast)."""
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


#: (x_MK, w_NK, bias_N or None, context) to y_MN, in the dtype of x.
linear_function = _LinearFunction.apply

#: (x_MD, the first layer's weight, the second layer's, both contexts) to z_MD, all in one compute dtype.
swiglu_mlp = _SwigluMlp.apply
