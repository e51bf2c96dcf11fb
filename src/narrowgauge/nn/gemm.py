"""The product of two operands, each given as (rows, contraction): c_MN = a_MK @ b_NK.T.

An emulated operand carries the scale of a full tensor separately from its values. The scale belongs to the
fp32 accumulator, before the result is rounded to bf16; applied later, it would round the result twice. On a
CPU oneDNN applies `alpha` to the accumulator (fp32 products do without it: MKL takes an alpha of NaN for 1);
on a GPU the product is computed in fp32. It is one operator, so that compiled graphs hold it as a unit.
Native operands go to the hardware unchanged (`native.py`).
"""

from typing import NamedTuple

import torch

from narrowgauge.devices import is_gpu, is_shape_only
from narrowgauge.kernels.cast import scaled_and_rounded
from narrowgauge.kernels.dispatch import is_slow
from narrowgauge.kernels.head_loss import aligned_rows
from narrowgauge.nn.native import QuantizedOperand, native_product

_VECTOR = 16  # bytes of the widest load


class Operand(NamedTuple):
    """An emulated operand as (rows, contraction): values in a wide dtype, and a 0-dim scale or None for 1."""

    values: torch.Tensor
    scale: torch.Tensor | None = None

    def transposed(self) -> "Operand":
        """The same numbers along the other axis."""
        return Operand(self.values.T, self.scale)

    def numbers(self) -> torch.Tensor:
        """The numbers that a product sees, scale applied."""
        return self.values if self.scale is None else self.values.float() * self.scale


@torch.library.custom_op("narrowgauge::scaled_mm", mutates_args=())
def scaled_mm(a_MK: torch.Tensor, b_KN: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(a @ b) * scale with one rounding to a's dtype; `scale` is a 0-dim float32 tensor."""
    if a_MK.dtype == torch.float32 or is_slow(a_MK):
        return ((a_MK.float() @ b_KN.float()) * scale).to(a_MK.dtype)
    if a_MK.device.type == "cpu":
        nothing = a_MK.new_zeros(())
        return torch.addmm(nothing, a_MK, b_KN, beta=0, alpha=scale.item())
    return _scaled_on_gpu(a_MK, b_KN, scale)


def _scaled_on_gpu(a_MK: torch.Tensor, b_KN: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if a_MK.dtype == torch.float32:
        return (a_MK @ b_KN) * scale
    return scaled_and_rounded(torch.mm(a_MK, b_KN, out_dtype=torch.float32), scale, a_MK.dtype)


@scaled_mm.register_fake
def _(a_MK: torch.Tensor, b_KN: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return a_MK.new_empty(a_MK.shape[0], b_KN.shape[1])


def multiply(
    a: Operand | QuantizedOperand, b: Operand | QuantizedOperand, dtype: torch.dtype, fast: bool = False
) -> torch.Tensor:
    """The product of (M, K) and (N, K) as (M, N).

    Native operands give `dtype` (`fast`: see `native_product`), emulated ones that or their own, if wider.
    """
    if isinstance(a, QuantizedOperand) and isinstance(b, QuantizedOperand):
        return native_product(a, b, dtype, fast)
    assert isinstance(a, Operand)
    assert isinstance(b, Operand)
    a_MK, b_KN = a.values, b.values.T
    # Where one operand is kept wider, or the result, the product is computed in the wider dtype.
    wider = torch.promote_types(torch.promote_types(a_MK.dtype, b_KN.dtype), dtype)
    a_MK, b_KN = a_MK.to(wider), b_KN.to(wider)
    scales = [s for s in (a.scale, b.scale) if s is not None]
    if not scales:
        if is_slow(a_MK):
            return (a_MK.float() @ b_KN.float()).to(a_MK.dtype)
        return _plain_product(a_MK, b_KN)
    scale = scales[0] * scales[1] if len(scales) == 2 else scales[0]
    if a_MK.is_meta and not is_shape_only(a_MK):
        return _scaled_on_gpu(a_MK, b_KN, scale)  # the kernels of the operator, for what counts them
    return scaled_mm(a_MK, b_KN, scale)


def _plain_product(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """a @ b; on a GPU each row of the result begins at a multiple of 16 bytes.

    The logits of a vocabulary of 50,257 would not. Then neither this product nor the two of its gradient,
    which is written over them, nor the kernels of the loss could load more than a number at a time.
    """
    N, size = b_KN.shape[1], a_MK.element_size()
    if N * size % _VECTOR == 0 or N < _VECTOR or not is_gpu(a_MK.device) or torch.compiler.is_compiling():
        return a_MK @ b_KN
    out_MN = aligned_rows(len(a_MK), N, a_MK)
    return torch.mm(a_MK, b_KN, out=out_MN)
