"""Rounding and encoding as done by hand: slow, exact, and the reference for the fast version.

Everything is rational arithmetic (`fractions.Fraction`): find the two neighbours of x on the grid and pick
the nearer. No trick is shared with `rounding.py` and `codes.py`.
"""

import math
from fractions import Fraction

from narrowgauge.formats.format import Format
from narrowgauge.formats.table import ROUNDINGS, format
from narrowgauge.system.errors import unknown

FP32 = format("fp32")


def round_scalar(x: float, fmt: Format, rounding: str = "nearest-even", uniform: float = 0.5) -> float:
    """Round one value to the grid of `fmt`; see `rounding.round_to`.

    Args:
        x: The value.
        fmt: The format.
        rounding: The name of the rounding.
        uniform: The random value in [0, 1) of "stochastic": rounds up if the fraction of the gap exceeds it.
    """
    if math.isnan(x) or (math.isinf(x) and not fmt.has_infinity) or (x < 0 and not fmt.signed):
        return math.nan
    if math.isinf(x):
        return x
    if not fmt.zero and x <= 0:
        return math.nan
    result = float(round_magnitude(abs(Fraction(x)), fmt, rounding, Fraction(uniform)))
    if not fmt.zero:
        is_between_smallest = fmt.smallest_normal < x < 2 * fmt.smallest_normal
        if rounding == "nearest-even" and is_between_smallest:  # ml_dtypes and torch go up
            return 2 * fmt.smallest_normal
        return max(result, fmt.smallest_normal)
    return math.copysign(result, x) if result or fmt.has_negative_zero else 0.0


def round_magnitude(
    magnitude: Fraction, fmt: Format, rounding: str = "nearest-even", uniform: Fraction = Fraction(1, 2)
) -> Fraction:
    """Round a non-negative value, at most to the largest finite one.

    Let f be the distance to the lower neighbour as a share of the gap. "stochastic" rounds up if f exceeds
    `uniform`, "stochastic-hardware" if f is at least 1 - `uniform`.
    """
    magnitude = min(magnitude, Fraction(fmt.max))
    lower, upper = _neighbours(magnitude, fmt)
    share = (magnitude - lower) / (upper - lower)
    steps = lower / (upper - lower)  # the lower neighbour in quanta: has the parity of its code
    match rounding:
        case "nearest-even":
            is_odd = steps % 2 if fmt.mantissa_bits or not fmt.zero else code_of(float(lower), fmt) % 2
            up = share > Fraction(1, 2) or (share == Fraction(1, 2) and bool(is_odd))
        case "half-away":
            up = share >= Fraction(1, 2)
        case "toward-zero":
            up = False
        case "stochastic":
            up = share > uniform
        case "stochastic-hardware":
            up = share >= 1 - uniform
        case _:
            raise unknown("rounding", rounding, ROUNDINGS)
    return upper if up else lower


def fl(x: Fraction) -> Fraction:
    """The float32 nearest to x, ties to even; overflow saturates."""
    rounded = round_magnitude(abs(x), FP32)
    return rounded if x >= 0 else -rounded


def code_of(value: float, fmt: Format) -> int:
    """The code of NaN, or of a value on the grid of `fmt` (positive for E8M0)."""
    if math.isnan(value):
        assert fmt.nan_code is not None
        return fmt.nan_code
    if fmt.twos_complement:
        return int(Fraction(value) / Fraction(fmt.smallest_subnormal)) % 2**fmt.bits
    sign = math.copysign(1, value) < 0 and (value != 0 or fmt.has_negative_zero)
    magnitude = abs(Fraction(value))
    exponent = max(floor_log2(magnitude), fmt.emin) if magnitude else fmt.emin
    quanta = magnitude / Fraction(2) ** (exponent - fmt.mantissa_bits)
    assert quanta.denominator == 1, f"{value} is not on the grid of {fmt.name}"
    if not fmt.zero:
        return exponent - fmt.emin
    is_normal = quanta >= 2**fmt.mantissa_bits
    field = (exponent - fmt.emin + 1) * 2**fmt.mantissa_bits + int(quanta) - 2**fmt.mantissa_bits
    return sign * 2 ** (fmt.bits - 1) + (field if is_normal else int(quanta))


def floor_log2(x: Fraction) -> int:
    """The exponent e of a positive x, with 2^e <= x < 2^(e + 1)."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()  # e or e + 1
    return guess - (Fraction(2) ** guess > x)


def _neighbours(magnitude: Fraction, fmt: Format) -> tuple[Fraction, Fraction]:
    """The grid points at or just below, and above, a non-negative value."""
    exponent = max(floor_log2(magnitude), fmt.emin) if magnitude else fmt.emin
    quantum = Fraction(2) ** (exponent - fmt.mantissa_bits)
    lower = magnitude // quantum * quantum
    return lower, lower + quantum
