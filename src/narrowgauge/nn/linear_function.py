"""The three GEMMs of a linear layer under a recipe, as one autograd function.

Legend: M tokens, K inputs, N outputs.

    forward    y_MN  = fprop.x(x_MK)  @ fprop.w(w_NK).T          blocks along K
    backward   dx_MK = dgrad.dy(dy_MN) @ dgrad.w(w_NK)           blocks along N
               dw_NK = wgrad.dy(dy_MN).T @ wgrad.x(x_MK)         blocks along M

Each `place(tensor)` is what the GEMM sees of the tensor in that place's format (`quantization.emulate`).
An operand is quantized again for the backward pass, from high precision, because its blocks lie along
another axis there; where they do not (one scale per tensor, square blocks), the same numbers are used
twice.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from narrowgauge.nn.gemm import multiply
from narrowgauge.nn.gemm_context import GemmContext
from narrowgauge.nn.observer import evenly
from narrowgauge.nn.saved import keep_as_it_is
from narrowgauge.nn.sharded.gathered_weight import GatheredWeight
from narrowgauge.quantization import QuantContext, estimator_slope


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None, places: GemmContext
    ) -> torch.Tensor:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        # What was gathered is gathered again, so that nothing of it is kept.
        ctx.reuses_w = places.shared("fprop.w", "dgrad.w") and not isinstance(w_NK, GatheredWeight)
        x = places.operand(x_MK, "fprop.x", -1, both=needs_dw and places.reuses_x)
        w = places.operand(places.wide(w_NK), "fprop.w", -1, both=needs_dx and ctx.reuses_w)
        y_MN = multiply(x, w, places.compute, fast=True)
        some_x_RM = None
        if places.observer is not None:
            some_x_RM = evenly(x_MK.T).clone()
            places.observer.product("fprop.y", y_MN, x_MK, places.wide(w_NK))
        if bias_N is not None:
            y_MN += bias_N.to(y_MN.dtype)  # in place: another tensor of this size costs its memory's pages
        kept, ctx.restore_x = places.keep(x_MK, x)
        kept_w, ctx.restore_w = keep_as_it_is(w) if ctx.reuses_w else ((None, None, None), None)
        needs_w = not ctx.reuses_w or places.casts["fprop.w"].estimator_k or places.observer is not None
        ctx.save_for_backward(w_NK if needs_w else None, *kept_w, *kept, some_x_RM)
        ctx.places = places
        ctx.dtypes = x_MK.dtype, w_NK.dtype, None if bias_N is None else bias_N.dtype
        return y_MN.to(x_MK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with autocast_disabled(dy_MN.device.type):
            return _backward(ctx, dy_MN)


def _backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    w_NK, *kept = ctx.saved_tensors
    places: GemmContext = ctx.places
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    dx_MK = dw_NK = dbias_N = dy = None
    if ctx.needs_input_grad[0]:
        shared = ctx.needs_input_grad[1] and places.shared("dgrad.dy", "wgrad.dy")
        dy = places.operand(dy_MN, "dgrad.dy", -1, both=shared)
        if ctx.reuses_w:
            w = ctx.restore_w(*kept[:3]).transposed()
        else:
            w = places.operand(places.wide(w_NK), "dgrad.w", 0)
        dx_MK = multiply(dy, w, places.compute).to(x_dtype)
        if places.observer is not None:
            places.observer.product("dgrad.dx", dx_MK, dy_MN, places.wide(w_NK).T)
    if ctx.needs_input_grad[1]:
        if dy is not None and places.shared("dgrad.dy", "wgrad.dy"):
            dy = dy.transposed()
        else:
            dy = places.operand(dy_MN, "wgrad.dy", 0)
        x = ctx.restore_x(*kept[3:6])
        x = x.transposed() if places.reuses_x else places.operand(x.values, "wgrad.x", 0)
        # A sum that lacks the tokens of others is not rounded before it is whole.
        is_whole = places.part("wgrad.x") is None
        dw_NK = multiply(dy, x, places.compute if is_whole else torch.float32)
        if places.observer is not None:
            places.observer.product("wgrad.dw", dw_NK.T, kept[6], dy_MN.T)
        if places.casts["fprop.w"].estimator_k:
            w_context = QuantContext(shard=places.part("fprop.w"))
            dw_NK = dw_NK * estimator_slope(places.wide(w_NK), places.casts["fprop.w"], -1, w_context)
        dw_NK = None if places.take_gradient(dw_NK) else dw_NK.to(w_dtype)
    if bias_dtype is not None and ctx.needs_input_grad[2]:
        dbias_N = dy_MN.sum(0, dtype=torch.float32).to(bias_dtype)
    return dx_MK, dw_NK, dbias_N, None


def autocast_disabled(device: str) -> AbstractContextManager[Any]:
    """No autocast: what is computed in what is not its business here (the meta device has none)."""
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


#: (x_MK, w_NK, bias_N or None, places) to y_MN, in the dtype of x.
linear_function = _LinearFunction.apply
