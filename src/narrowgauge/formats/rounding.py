"""Rounds a tensor to a format's grid.

Around x the values of a format are evenly spaced by the quantum

    q(x) = 2^(max(floor(log2 |x|), emin) - M)

(M mantissa bits; below 2^emin the spacing is that of the subnormals). Rounding therefore divides by q, rounds
to an integer and multiplies by q. q is a power of two read from x's exponent bits, so both multiplications
are exact and the only rounding is the requested one. A mantissa that rounds up to 2 lands on the next binade
without special handling. Values beyond the largest finite one are clipped to it first (saturation). NaN stays
NaN; infinity stays where the format has one and becomes NaN where it does not.

    nearest-even   ties to the even code (IEEE 754's default, OCP MX's)
    half-away      ties away from zero
    toward-zero    truncation
    stochastic     up with probability (x - lower) / q: unbiased, with 24 random bits per element. With n < 24
                   bits it matches hardware (sm_100 uses 8): floor((x - lower) / q + r / 2^n), r from 0 to
                   2^n - 1, which is biased low by up to q / 2^n

Arithmetic runs in fp32, whose 24 bits hold x / q exactly, or in fp64 where fp32's exponent range is too short
(formats as wide as bf16, float64 inputs). Torch's FP8 casts are not used: versions disagree about overflow
(NaN in 2.11, 448 in 2.13).

The slow reference, `conformance/oracle/rounding.py`, passes the same tests.
"""

from operator import ge
from typing import Any

import torch

from narrowgauge.formats import table
from narrowgauge.formats.counter_rng import Randomness, uniform_for
from narrowgauge.formats.format import Format, Specials
from narrowgauge.formats.table import RANDOM_BITS, ROUNDINGS
from narrowgauge.system.errors import UserError, unknown

_FORMATS = {table.torch_dtype(fmt): fmt for fmt in map(table.format, table.format_names())}
_FORMATS[torch.float64] = Format("fp64", 11, 52, 1023, Specials.IEEE)

# The working precision: (integer dtype of the same width, exponent mask, mantissa bits, exponent bias).
_LAYOUT = {
    torch.float32: (torch.int32, 0x7F800000, 23, 127),
    torch.float64: (torch.int64, 0x7FF0000000000000, 52, 1023),
}


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


def round_to(
    x: torch.Tensor, format: str | Format, rounding: str = "nearest-even", generator: Randomness = None
) -> torch.Tensor:
    """Round every element of a tensor to a value of a format, by the named rounding.

    Args:
        x: A floating tensor of any shape. Its gradient is that of the result (straight through).
        format: A format or its name, such as "e2m1".
        rounding: "nearest-even", "half-away", "toward-zero" or "stochastic".
        generator: The source of random bits for "stochastic"; torch's default generator if None.

    Returns:
        A tensor of x's shape, in x's dtype if that has every value of the format, else in float32. Finite
        overflow saturates; NaN stays NaN; infinity becomes NaN in formats without one.

    Raises:
        UserError: Unknown format or rounding; not a dense floating tensor.
    """
    require_values(x)
    fmt = table.known_format(format) if isinstance(format, Format) else table.format(format)
    # In fp64 where fp32's exponent range does not hold the grid and its inverse quanta.
    needs_fp64 = x.dtype == torch.float64 or fmt.exponent_bits == 8
    x_work = x.detach().to(torch.float64 if needs_fp64 else torch.float32)
    y = round_finite(x_work, fmt, rounding, generator)
    y = torch.where(x_work.isinf(), x_work if fmt.has_infinity else float("nan"), y)
    if not fmt.signed:  # values without a code become NaN: negative ones, and zero in E8M0
        y = torch.where(x_work >= 0 if fmt.zero else x_work > 0, y, float("nan"))
    y = y.to(x.dtype if holds(x.dtype, fmt) else torch.float32)
    return StraightThrough.apply(x, y) if x.requires_grad and torch.is_grad_enabled() else y


def round_finite(
    x: torch.Tensor, fmt: Format, rounding: str = "nearest-even", generator: Randomness = None
) -> torch.Tensor:
    """`round_to` for float32 or float64, except that infinities become the largest finite value."""
    return round_finite_(x.clone(), fmt, rounding, generator)


def round_finite_(
    x: torch.Tensor,
    fmt: Format,
    rounding: str = "nearest-even",
    generator: Randomness = None,
    random_bits: int = RANDOM_BITS,
) -> torch.Tensor:
    """`round_finite` in place: the inner loop of every quantizer. Returns x."""
    above_smallest = x > fmt.smallest_normal if not fmt.zero else None
    x.clamp_(-fmt.max, fmt.max)
    exponent = exponent_bits(x, fmt)
    x.mul_(inverse_quantum(exponent, fmt, x.dtype))
    if rounding == "nearest-even":
        if fmt.zero and not fmt.mantissa_bits:  # a code a binade: a tie above an even code belongs to it
            int_dtype, _, mantissa_bits, bias = _LAYOUT[x.dtype]
            x.view(int_dtype).sub_((exponent >> mantissa_bits) - (fmt.emin + bias) & 1)
        x.round_()
    else:
        _round_to_integer_(x, rounding, generator, random_bits)
    x.mul_(exponent.sub_(fmt.mantissa_bits << _LAYOUT[x.dtype][2]).view(x.dtype))  # q, exact
    if above_smallest is not None:
        x.clamp_(min=fmt.smallest_normal)
        if rounding == "nearest-even":  # like ml_dtypes and torch: rounds up between the two smallest scales
            x.copy_(torch.where(above_smallest & (x == fmt.smallest_normal), 2 * x, x))
    return x if fmt.has_negative_zero else x.masked_fill_(x == 0, 0.0)  # compilers drop x + 0


def exponent_bits(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The exponent field of each element, at least that of 2^emin, as integers whose other bits are zero."""
    int_dtype, exponent_mask, mantissa_bits, bias = _LAYOUT[x.dtype]
    return (x.view(int_dtype) & exponent_mask).clamp_(min=(fmt.emin + bias) << mantissa_bits)


def inverse_quantum(exponent: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """1 / q from `exponent_bits`, exact, as a float tensor."""
    _, _, mantissa_bits, bias = _LAYOUT[dtype]
    return (((2 * bias + fmt.mantissa_bits) << mantissa_bits) - exponent).view(dtype)


def _round_to_integer_(t: torch.Tensor, rounding: str, generator: Randomness, random_bits: int) -> None:
    """Round to integers by a rounding other than "nearest-even", in place; keeps the sign of zero."""
    integer = t.abs()
    if rounding == "toward-zero":
        torch.copysign(integer.floor_(), t, out=t)  # torch's trunc is forty times slower on a CPU
        return
    fraction = integer.frac()  # exact: t has few bits above its integer part
    integer.floor_()
    if rounding == "half-away":
        up = fraction.ge_(0.5)
    elif rounding == "stochastic":
        up = _goes_up_(fraction, generator, random_bits)
    else:
        raise unknown("rounding", rounding, ROUNDINGS)
    torch.copysign(integer.add_(up), t, out=t)


def _goes_up_(fraction: torch.Tensor, generator: Randomness, random_bits: int) -> torch.Tensor:
    """Whether each fraction of a quantum rounds up: 1 or 0, in the memory of the fractions."""
    uniform = uniform_for(fraction, generator)
    if random_bits == RANDOM_BITS:
        return fraction.gt_(uniform)
    r = (uniform * 2**random_bits).floor()  # uniform < 1
    return fraction.ge_(1 - r * 2.0**-random_bits)  # exact; comparing the sum with 1 would round
