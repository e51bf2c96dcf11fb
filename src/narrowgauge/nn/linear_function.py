"""The three GEMMs of a linear layer under a recipe, as one autograd function.

Legend: M tokens, K inputs, N outputs.

    forward    y_MN  = fprop.x(x_MK)  @ fprop.w(w_NK).T          blocks along K
    backward   dx_MK = dgrad.dy(dy_MN) @ dgrad.w(w_NK)           blocks along N
               dw_NK = wgrad.dy(dy_MN).T @ wgrad.x(x_MK)         blocks along M

Each `place(tensor)` is what the GEMM sees of the tensor in that place's format (`Operands.of`). An operand is
quantized again for the backward pass, from high precision, because its blocks lie along another axis there;
where they do not (one scale per tensor, square blocks), the same values are used twice. A recipe may say the
same of any operand (`dgrad.w = "fprop.w"`): the values of the first matmul as they are, or rounded once more.

Where x keeps some channels in another cast (`keep_channels`), so may w: y is the sum of a matmul of the kept
channels and one of the others. Their columns of dw come from operands in that cast, dy included.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from narrowgauge.kernels import emulate
from narrowgauge.kernels.cast import attached_amax
from narrowgauge.kernels.dispatch import is_discarding, is_unread
from narrowgauge.nn.gemm import ROWS, VALUES, Operand, add_bias, multiply, sum_rows
from narrowgauge.nn.operands import Operands, evenly, keep_input, weight_values
from narrowgauge.quantization import QuantContext, kept_count
from narrowgauge.quantization import cast as named_cast
from narrowgauge.recipes.places import MEETS
from narrowgauge.system.second_derivative import FirstOrderFunction


class _LinearFunction(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None, operands: Operands
    ) -> torch.Tensor:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        ctx.operands, observer = operands, operands.observer
        ctx.dtypes = x_MK.dtype, w_NK.dtype, None if bias_N is None else bias_N.dtype
        operands.choose_channels(x_MK)
        ctx.reuses_w = operands.reuses_weight(w_NK)
        is_kept = not is_discarding()
        both_x = needs_dw and operands.layer.reuses_x and is_kept
        x = operands.of(x_MK, "fprop.x", -1, both_x, operands.input_amax)
        w = operands.of_weight(w_NK, "fprop.w", -1, both=needs_dx and ctx.reuses_w and is_kept)
        if is_unread() and observer is None:
            y_MN, bias_N = x_MK.new_empty(len(x_MK), len(w_NK)), None
        else:
            # A bias is added before the sum is rounded, where that is in fp32.
            is_wide = bias_N is not None and x.form == ROWS
            y_MN = multiply(x, w, torch.float32 if is_wide else operands.layer.compute, fast=True)
        some_x_RM = None
        if observer is not None:
            some_x_RM = evenly(x_MK.T).clone()
            observer.product("fprop.y", y_MN, x_MK, weight_values(w_NK))
        if bias_N is not None:
            y_MN = add_bias(y_MN, bias_N)
        kept_x, ctx.restore_x = keep_input(x_MK, x, operands)
        kept_w, ctx.restore_w = w.kept() if ctx.reuses_w else ((None,) * 4, None)
        has_slope = bool(operands.layer.casts["fprop.w"].estimator_k)
        needs_w = not ctx.reuses_w or has_slope or observer is not None
        ctx.save_for_backward(w_NK if needs_w else None, *kept_w, *kept_x, some_x_RM)
        return y_MN.to(x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with autocast_disabled(dy_MN.device.type):
            return _backward(ctx, dy_MN)


def _backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    w_NK, *kept, some_x_RM = ctx.saved_tensors
    kept_w, kept_x = kept[:4], kept[4:]
    del kept
    operands: Operands = ctx.operands
    layer, observer = operands.layer, operands.observer
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    needs_dx, needs_dw, needs_dbias, _ = ctx.needs_input_grad
    shares_dy = needs_dx and needs_dw and layer.shares_dy
    dx_MK = dw_NK = dbias_N = dy = None
    dy_amax = attached_amax(dy_MN)
    if needs_dx:
        dy = operands.of(dy_MN, "dgrad.dy", -1, shares_dy, dy_amax)
        if ctx.reuses_w:
            w = operands.requantized(ctx.restore_w(*kept_w), "dgrad.w")
        elif layer.casts["dgrad.w"].of:
            w = operands.requantized(operands.of_weight(w_NK, "fprop.w", -1), "dgrad.w")
        else:
            w = operands.of_weight(w_NK, "dgrad.w", 0)
        dx_MK = multiply(dy, w, layer.compute).to(x_dtype)
        del w, kept_w  # the gradient of the weight may take its memory, unless the graph is retained
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()
        if observer is not None:
            observer.product("dgrad.dx", dx_MK, dy_MN, weight_values(w_NK).T)
    if needs_dw:
        if layer.casts["wgrad.dy"].of:
            dy = operands.requantized(dy or operands.of(dy_MN, "dgrad.dy", -1, amax=dy_amax), "wgrad.dy")
        elif shares_dy and dy is not None:
            dy = dy.transposed()
        else:
            dy = operands.of(dy_MN, "wgrad.dy", 0, amax=dy_amax)
        x = ctx.restore_x(*kept_x)
        if layer.reuses_x:
            x = operands.requantized(x, "wgrad.x")
        else:
            amax = operands.input_amax if layer.saved == "input" else None
            x = operands.of(x.elements, "wgrad.x", 0, amax=amax)
        # A sum that lacks the tokens of other processes is not rounded before it is complete.
        dtype = layer.compute if operands.shard("wgrad.x") is None else torch.float32
        dw_NK = multiply(dy, x, dtype)
        if layer.casts["wgrad.dy"].keep_cast and layer.casts["wgrad.x"].keep_channels:
            dw_NK = _with_kept(operands, dw_NK, dy_MN, x, dtype, dy_amax)
        if observer is not None:
            observer.product("wgrad.dw", dw_NK.T, some_x_RM, dy_MN.T)
        node = None if torch.compiler.is_compiling() else ctx.next_functions[1][0]
        dw_NK = operands.weight_gradient(dw_NK, w_NK, w_dtype, node)
    if bias_dtype is not None and needs_dbias:
        dbias_N = sum_rows(dy_MN).to(bias_dtype)
    return dx_MK, dw_NK, dbias_N, None


def _with_kept(
    operands: Operands,
    dw_NK: torch.Tensor,
    dy_MN: torch.Tensor,
    x: Operand,
    dtype: torch.dtype,
    dy_amax: torch.Tensor | None,
) -> torch.Tensor:
    """The weight's gradient, its kept channels from operands in their cast.

    There x is in that cast as well, and not transformed, so that it meets dy neither narrow nor transformed.
    `dw_NK` is the matmul of wgrad's operands, changed in place; of these, `x` is (K, M), and a transform of
    the other channels may have lengthened M.
    """
    casts, shard = operands.layer.casts, operands.shard("wgrad.x")
    channels, cast = operands.kept_channels("wgrad.x"), named_cast(casts[MEETS].keep_cast)
    context = QuantContext(shard=operands.shard(MEETS), amax=dy_amax)
    dy = Operand(*emulate(dy_MN, cast, 0, operands.layer.compute, context))
    assert x.form == VALUES  # such a matmul has no native scheme
    everywhere = len(channels) if shard is None else shard.axes[-1].size
    most = min(kept_count(casts["wgrad.x"].keep_channels, everywhere), len(channels))
    columns = channels.to(torch.int8).topk(most).indices  # with some that are not kept, where few are
    kept = Operand(x.elements[columns, : dy_MN.shape[0]], x.scale)
    there = multiply(dy.transposed(), kept, dtype).to(dw_NK.dtype)
    return dw_NK.index_copy_(1, columns, torch.where(channels[columns], there, dw_NK[:, columns]))


def autocast_disabled(device: str) -> AbstractContextManager[Any]:
    """A context without autocast, because the recipe decides the dtypes (the meta device has no autocast)."""
    if device == "meta" or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(device)):
        return nullcontext()
    return torch.autocast(device, enabled=False)


#: (x_MK, w_NK, bias_N or None, operands) to y_MN, in the dtype of x.
linear_function = _LinearFunction.apply
