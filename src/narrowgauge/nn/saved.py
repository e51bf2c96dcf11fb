"""What a layer keeps of its input for the backward pass: the place `saved`.

input      the tensor as it came, or the operand where wgrad sees the same numbers as fprop
operand    the numbers of fprop.x in the bytes of their format: one byte an element in FP8, half in FP4.
           Where wgrad sees the same numbers (one scale per tensor), nothing else changes; elsewhere its
           operand is quantized from these numbers, a second time
a cast     the same, in another format than fprop.x's
"""

from collections.abc import Callable

import torch

from narrowgauge.formats import decode, encode, pack, unpack
from narrowgauge.kernels import emulate, quantize
from narrowgauge.nn.gemm import AnyOperand, Operand, RowOperand
from narrowgauge.nn.gemm_context import GemmContext
from narrowgauge.nn.native import QuantizedOperand
from narrowgauge.nn.observer import Observation
from narrowgauge.quantization import DEFAULT_CONTEXT, Cast, QTensor, QuantContext

Tensors = tuple[torch.Tensor | None, ...]
# The three tensors that were kept, to the operand.
Restore = Callable[..., AnyOperand]


def keep_input(x_MK: torch.Tensor, operand: AnyOperand, context: GemmContext) -> tuple[Tensors, Restore]:
    """Keep a layer's input; `operand` is what fprop saw of it."""
    saved, fprop = context.layer.saved, context.layer.casts["fprop.x"]
    if context.reuses_x:
        has_one_scale = fprop.is_scaled and fprop.block is None
        if saved == "operand" and has_one_scale and isinstance(operand, Operand):
            return _keep_codes(operand, fprop)
        keeps_codes = saved == "operand" and fprop.is_scaled and not fprop.compensate
        if keeps_codes and context.layer.casts["wgrad.x"].of:
            quantized, _ = quantize(
                x_MK, fprop, -1, context.quant_context(x_MK, "fprop.x", context.input_amax)
            )
            return _keep_quantized(quantized, context.layer.compute, is_operand=True)
        return keep_operand(operand)
    if saved == "input":
        return keep_operand(Operand(x_MK))
    cast = fprop if isinstance(saved, str) else saved
    if not cast.is_scaled:
        return keep_operand(Operand(emulate(x_MK, cast, -1, context.layer.compute)[0]))
    amax = context.input_amax
    plain = QuantContext(shard=context.shard("fprop.x"), amax=amax)
    used = context.quant_context(x_MK, "fprop.x", amax) if saved == "operand" else plain
    q, _ = quantize(x_MK, cast, -1, used)
    if context.observer is not None and saved != "operand":
        observed = Observation("saved", x_MK, q.dequantize(), None, cast, -1, DEFAULT_CONTEXT)
        context.observer.operand(observed)
    return _keep_quantized(q, x_MK.dtype)


def keep_operand(operand: AnyOperand) -> tuple[Tensors, Restore]:
    """Keep an operand in the tensors that it has."""
    if isinstance(operand, RowOperand):
        return tuple(operand), RowOperand
    if isinstance(operand, QuantizedOperand):
        cast = operand.cast
        codes = operand.codes if operand.other is None else operand.other.T  # the backward pass wants these
        return (codes, *operand[1:3]), lambda codes, scales, tensor_scale: QuantizedOperand(
            codes, scales, tensor_scale, cast
        )
    return (*operand, None), lambda values, scale, _: Operand(values, scale)


def _keep_codes(operand: Operand, cast: Cast) -> tuple[Tensors, Restore]:
    """Keep an operand with one scale (`emulate`) as bytes."""
    values, scale = operand
    element, width, dtype = cast.element, values.shape[-1], values.dtype

    def restore(packed: torch.Tensor, scale: torch.Tensor | None, _: None) -> Operand:
        return Operand(decode(unpack(packed, element, width), element, dtype), scale)

    return (pack(encode(values, element), element), scale, None), restore


def _keep_quantized(q: QTensor, dtype: torch.dtype, is_operand: bool = False) -> tuple[Tensors, Restore]:
    """Keep a quantized tensor: packed codes, scales, tensor scale; restored as a tensor, or as an operand."""
    cast, blocks, width, element = q.cast, q.blocks, q.codes.shape[-1], q.cast.element

    def restore(packed: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor) -> Operand:
        q = QTensor(unpack(packed, element, width), scales, None, tensor_scale, cast, blocks)
        return Operand(*q.operand(dtype)) if is_operand else Operand(q.dequantize(dtype))

    return (q.packed(), q.scales, q.tensor_scale), restore
