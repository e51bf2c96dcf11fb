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
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from narrowgauge.kernels.gradient_sum import through_rounding
from narrowgauge.kernels.recompute import is_discarding, is_unread
from narrowgauge.nn.gemm import multiply
from narrowgauge.nn.gemm_context import GemmContext
from narrowgauge.nn.observer import evenly
from narrowgauge.nn.saved import keep_input, keep_operand
from narrowgauge.nn.sharded.gathered_weight import GatheredWeight
from narrowgauge.quantization import QuantContext


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
        x = context.operand(x_MK, "fprop.x", -1, both=needs_dw and context.reuses_x and is_kept)
        w = context.weight_operand(w_NK, "fprop.w", -1, both=needs_dx and ctx.reuses_w and is_kept)
        if is_unread() and context.observer is None:
            y_MN, bias_N = x_MK.new_empty(len(x_MK), len(w_NK)), None
        else:
            y_MN = multiply(x, w, context.layer.compute, fast=True)
        some_x_RM = None
        if context.observer is not None:
            some_x_RM = evenly(x_MK.T).clone()
            context.observer.product("fprop.y", y_MN, x_MK, context.numbers_of(w_NK))
        if bias_N is not None:
            y_MN += bias_N.to(y_MN.dtype)  # in place: another tensor of this size costs its memory's pages
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
    context: GemmContext = ctx.context
    compute, w_cast = context.layer.compute, context.layer.casts["fprop.w"]
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    needs_dx, needs_dw, needs_dbias, _ = ctx.needs_input_grad
    shares_dy = needs_dx and needs_dw and context.shared("dgrad.dy", "wgrad.dy")
    dx_MK = dw_NK = dbias_N = dy = None
    if needs_dx:
        dy = context.operand(dy_MN, "dgrad.dy", -1, both=shares_dy)
        if ctx.reuses_w:
            w = context.again(ctx.restore_w(*kept[:3]), "dgrad.w")
        elif context.layer.casts["dgrad.w"].of:
            w = context.again(context.weight_operand(w_NK, "fprop.w", -1), "dgrad.w")
        else:
            w = context.weight_operand(w_NK, "dgrad.w", 0)
        dx_MK = multiply(dy, w, compute).to(x_dtype)
        if context.observer is not None:
            context.observer.product("dgrad.dx", dx_MK, dy_MN, context.numbers_of(w_NK).T)
    if needs_dw:
        if context.layer.casts["wgrad.dy"].of:
            dy = context.again(dy or context.operand(dy_MN, "dgrad.dy", -1), "wgrad.dy")
        else:
            dy = dy.transposed() if shares_dy and dy is not None else context.operand(dy_MN, "wgrad.dy", 0)
        x = ctx.restore_x(*kept[3:])
        x = context.again(x, "wgrad.x") if context.reuses_x else context.operand(x.values, "wgrad.x", 0)
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


def autocast_disabled(device: str) -> AbstractContextManager[Any]:
    """A context without autocast, because the recipe decides the dtypes (the meta device has no autocast)."""
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


#: (x_MK, w_NK, bias_N or None, context) to y_MN, in the dtype of x.
linear_function = _LinearFunction.apply
