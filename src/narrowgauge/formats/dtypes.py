"""Which tensors have values that a format can round, and which dtypes of torch have a format's values?"""

from operator import ge
from typing import Any

import torch

from narrowgauge.errors import UserError
from narrowgauge.formats.format import Format, Specials
from narrowgauge.formats.table import format, format_names, torch_dtype

_FP64 = Format("fp64", 11, 52, 1023, Specials.IEEE)
_FORMATS = {torch_dtype(fmt): fmt for fmt in map(format, format_names())} | {torch.float64: _FP64}


def require_values(x: object) -> None:
    """Refuse what is not a dense tensor of floating-point values: the check of all functions for users."""
    if not isinstance(x, torch.Tensor):
        raise UserError(f"x is of type {type(x).__name__}: it must be a tensor; torch.tensor(x) makes one")
    if x.is_nested:
        raise UserError("x is nested: it must be a dense tensor; give the tensors of x.unbind()")
    if x.layout is not torch.strided:
        raise UserError(f"x is {x.layout}: it must be a dense tensor; give x.to_dense()")
    if x.dtype not in _FORMATS:
        mend = "view_as_real" if x.is_complex() else "dequantize" if x.is_quantized else "Tensor.float"
        raise UserError(f"x is of dtype {x.dtype}: it must be of a floating-point one; give torch.{mend}(x)")


def holds(dtype: torch.dtype, fmt: Format) -> bool:
    """Whether a dtype has every value of a format, its infinity and its -0."""
    own = _FORMATS.get(dtype)
    return own is not None and all(map(ge, own.extent, fmt.extent))


class StraightThrough(torch.autograd.Function):
    """`rounded`, with the gradient of x: rounding itself has the gradient 0 almost everywhere."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        """The rounded values."""
        return rounded

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient, unchanged."""
        return gradients[0], None
