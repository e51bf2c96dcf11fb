"""Linear layers and what comes between or after them as one function, where a GPU multiplies FP8 codes.

    z_MD = down(swiglu(gate_up(x_MD)))      Legend: M tokens, D inputs and outputs, F inner, G = 2F
    loss = cross entropy of head(x_MD)              V vocabulary

The layers multiply FP8 codes under one scale per tensor (`fp8_scaling`). The input of the second layer of an
MLP is not kept: the backward pass computes its codes again, in the pass that casts SwiGLU's gradient
(`kernels.activation`). The gradient of the logits is written as codes (`kernels.cross_entropy`).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch

from narrowgauge.kernels.activation import swiglu_by_kernel, swiglu_codes, swiglu_gradient_codes
from narrowgauge.kernels.amax import KnownAmax, amax_of_gradient
from narrowgauge.kernels.cross_entropy import gradient_codes, losses_before_codes
from narrowgauge.kernels.dispatch import use_kernels
from narrowgauge.kernels.recompute import is_discarding, is_unread, once
from narrowgauge.nn.gemm import AnyOperand, QuantizedOperand, multiply
from narrowgauge.nn.linear_function import autocast_disabled
from narrowgauge.nn.loop_checks import send_masters
from narrowgauge.nn.observer import Observer
from narrowgauge.nn.operands import LayerSpec, Operands, keep_operand
from narrowgauge.nn.shards import LinearShards
from narrowgauge.nn.weight import GatheredWeight
from narrowgauge.quantization import Cast
from narrowgauge.quantization import cast as named_cast
from narrowgauge.second_derivative import FirstOrderFunction
from narrowgauge.torch_compat import has_hooks, reshaped

_FP8 = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")


class _SwigluMlp(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, x_MD: torch.Tensor, w_GD: torch.Tensor, v_DF: torch.Tensor, both: tuple[Operands, Operands]
    ) -> torch.Tensor:
        first, second = both
        compute, is_kept = first.layer.compute, not is_discarding()
        x = first.of(x_MD, "fprop.x", -1, is_kept, first.input_amax)
        assert isinstance(x, QuantizedOperand)
        w = first.of_weight(w_GD, "fprop.w", -1, both=is_kept)
        v = second.of_weight(v_DF, "fprop.w", -1, both=is_kept)
        gate_up_MG = multiply(x, w, compute, fast=True)
        if is_unread():
            y_fact = once(lambda: _swiglu(gate_up_MG, second, x.tensor_scale)[1])
            z_MD = x_MD.new_empty(len(x_MD), len(v_DF))
        else:
            y, y_fact = _swiglu(gate_up_MG, second, x.tensor_scale)
            y_fact = once(lambda: y_fact)
            z_MD = multiply(y, v, compute, fast=True)
        kept = _keep(ctx, x=(x, None), w=(w, w_GD), v=(v, v_DF))
        ctx.save_for_backward(gate_up_MG, y_fact, *kept)
        ctx.both, ctx.dtypes = both, (w_GD.dtype, v_DF.dtype)
        return z_MD

    @staticmethod
    def backward(ctx: Any, dz_MD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with autocast_disabled(dz_MD.device.type):
            return _backward(ctx, dz_MD)


def _backward(ctx: Any, dz_MD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gate_up_MG, y_fact, *kept = ctx.saved_tensors
    first, second = ctx.both
    compute, cast, y_cast = first.layer.compute, first.layer.casts["dgrad.dy"], second.layer.casts["wgrad.x"]
    x = ctx.restore["x"](*kept[:3]).transposed()
    w, v = _kept_weight(ctx, "w", kept[3:6], first), _kept_weight(ctx, "v", kept[6:], second)
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


def _swiglu(
    gate_up_MG: torch.Tensor, operands: Operands, one: torch.Tensor
) -> tuple[QuantizedOperand, torch.Tensor]:
    """The SwiGLU output as the second layer's operand, plus what backward needs to rebuild it.

    That is its amax, or its scales under delayed scaling. `one` is a tensor scale of 1.
    """
    cast = operands.layer.casts["fprop.x"]
    if cast.amax.history:
        codes, scales = swiglu_codes(gate_up_MG, cast.element, operands.delayed_scale("fprop.x"))
        return QuantizedOperand(codes, scales[1], one, cast), scales
    y_MF, amax = swiglu_by_kernel(gate_up_MG)
    y = operands.of(y_MF, "fprop.x", -1, amax=amax)
    assert isinstance(y, QuantizedOperand)
    return y, amax


class _HeadLoss(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x_MD: torch.Tensor,
        w_VD: torch.Tensor,
        y_M: torch.Tensor,
        targets: int | None,
        operands: Operands,
    ) -> torch.Tensor:
        x = operands.of(x_MD, "fprop.x", -1, True, operands.input_amax)
        w = operands.of_weight(w_VD, "fprop.w", -1, both=True)
        logits_MV = multiply(x, w, operands.layer.compute, fast=True)
        ctx.ignores, ctx.count = targets is not None, len(y_M) if targets is None else max(targets, 1)
        loss_M, stats_2M, largest = losses_before_codes(logits_MV, y_M, ctx.ignores)
        ctx.save_for_backward(logits_MV, y_M, stats_2M, largest, *_keep(ctx, x=(x, None), w=(w, w_VD)))
        ctx.operands, ctx.dtype = operands, w_VD.dtype
        return loss_M.sum() / ctx.count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_MV, y_M, stats_2M, largest, *kept = ctx.saved_tensors
        operands, cast = ctx.operands, ctx.operands.layer.casts["dgrad.dy"]
        compute = operands.layer.compute
        delayed = operands.delayed_scale("dgrad.dy") if cast.amax.history else None
        codes_MV, codes_VM, scale = gradient_codes(
            logits_MV, y_M, stats_2M, largest, grad / ctx.count, ctx.ignores, cast.element, delayed
        )
        x = ctx.restore["x"](*kept[:3]).transposed()
        dz = QuantizedOperand(codes_MV, scale, x.tensor_scale, cast, codes_VM)
        del logits_MV
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()
        with autocast_disabled(grad.device.type):
            dx_MD = multiply(dz, _kept_weight(ctx, "w", kept[3:], operands), compute)
            dw = multiply(dz.transposed(), x, compute)
        stream, (_, (to_w, _), *_) = operands.gradient_stream(dw), ctx.next_functions
        dw_VD = operands.weight.left_for_autograd(dw, stream, ctx.dtype, to_w)
        return dx_MD, dw_VD, None, None, None


def _keep(ctx: Any, **operands: tuple[AnyOperand, torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Three tensors of each operand for the backward pass, from which `ctx.restore` makes it again.

    Of a gathered weight it is the weight itself, which is gathered again.
    """
    kept: list[torch.Tensor | None] = []
    ctx.restore = {}
    for name, (operand, weight) in operands.items():
        is_gathered = isinstance(weight, GatheredWeight)
        tensors, ctx.restore[name] = ((weight, None, None), None) if is_gathered else keep_operand(operand)
        kept += tensors
    return kept


def _kept_weight(ctx: Any, name: str, kept: Sequence[torch.Tensor], operands: Operands) -> AnyOperand:
    """A weight as the matmul of its input's gradient sees it."""
    restore = ctx.restore[name]
    return restore(*kept).transposed() if restore else operands.of_weight(kept[0], "dgrad.w", 0)


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
#: (x_MD, the head's weight, token ids, targets as in `cross_entropy`, operands) to the loss, 0-dim fp32.
head_loss = _HeadLoss.apply


class Fusable(torch.nn.Linear):
    """A layer that may be computed in one function with its neighbours, with the values of separate calls.

    None stands for what has to be called separately: without kernels or gradients, with biases, hooks, gauges
    or sharded matmuls, and under any recipe but FP8 with one scale a tensor. Weights may be gathered (FSDP).
    """

    spec: LayerSpec
    shards: LinearShards
    observer: Observer | None
    sequence_length: int
    is_sharded: bool
    calls = 0

    def operands(
        self, input: torch.Tensor, weight_NK: torch.Tensor, input_amax: torch.Tensor | None = None
    ) -> Operands:
        """The operands of this forward pass of an input, and of its backward pass."""
        raise NotImplementedError

    def after_swiglu(
        self, gate_up: torch.nn.Module, input: torch.Tensor, known: KnownAmax | None = None
    ) -> torch.Tensor | None:
        """This layer of SwiGLU of another layer's result, (..., K) to (..., N); less is kept for backward."""
        if not use_kernels(input) or not isinstance(gate_up, Fusable):
            return None
        are_alone = gate_up._is_alone(input) and self._is_alone(input)
        if not are_alone or fp8_scaling(gate_up.spec) != fp8_scaling(self.spec):
            return None
        amax = None if known is None else known.of(input)
        both = gate_up._alone(input, amax), self._alone(input)
        with autocast_disabled(input.device.type):
            x_MK = input.reshape(-1, gate_up.in_features)
            y_MN = swiglu_mlp(x_MK, gate_up.weight, self.weight, both)
        return reshaped(y_MN, (*input.shape[:-1], self.out_features))

    def into_loss(self, input: torch.Tensor, y: torch.Tensor, targets: int | None) -> torch.Tensor | None:
        """The cross entropy of this layer's results (..., N) and ids (...): see `kernels.cross_entropy`."""
        if not use_kernels(input) or not self._is_alone(input) or not input.numel():
            return None
        with autocast_disabled(input.device.type):
            x_MK = input.reshape(-1, self.in_features)
            loss: torch.Tensor = head_loss(x_MK, self.weight, y.flatten(), targets, self._alone(input))
        return loss

    def _alone(self, input: torch.Tensor, amax: torch.Tensor | None = None) -> Operands:
        """`operands` of a pass that counts as a call of this layer."""
        self.__dict__["calls"] = self.calls + 1
        operands = self.operands(input, self.weight, amax)
        send_masters(operands.weight.record)
        return operands

    def _is_alone(self, input: torch.Tensor) -> bool:
        """Whether this layer may be a part of a larger function."""
        is_trained = torch.is_grad_enabled() and input.requires_grad and self.weight.requires_grad
        is_gathered = not self.is_sharded or isinstance(self.weight, GatheredWeight)
        is_whole = self.shards == LinearShards() and is_gathered and not self.sequence_length
        bias: torch.Tensor | None = self.bias
        is_plain = bias is None and not self.spec.transposed and not has_hooks(self, before=True)
        is_native = input.dtype == self.spec.compute and bool(fp8_scaling(self.spec))
        return is_trained and is_whole and is_plain and is_native and self.observer is None
