"""Rounding as one would do it by hand: slow, exact, and the judge of the fast version.

Everything is rational arithmetic (`fractions.Fraction`): find the two neighbours of x on the grid, look
which is nearer. No trick is shared with `rounding.py`.
"""

import math
from fractions import Fraction

from narrowgauge.errors import unknown
from narrowgauge.formats.format import Format
from narrowgauge.formats.rounding import ROUNDINGS


def round_scalar(x: float, fmt: Format, rounding: str = "nearest-even", uniform: float = 0.5) -> float:
    """Round one number to the grid of `fmt`; see `rounding.round_to`.

    `uniform` in [0, 1) is the random number of "stochastic": up if the fraction of the gap exceeds it.
    """
    if math.isnan(x) or (math.isinf(x) and not fmt.has_infinity):
        return math.nan
    if math.isinf(x):
        return x
    if not fmt.zero and x <= 0:
        return math.nan
    magnitude = min(abs(Fraction(x)), Fraction(fmt.max))
    lower, upper = _neighbours(magnitude, fmt)
    fraction = (magnitude - lower) / (upper - lower)
    steps = lower / (upper - lower)  # the lower neighbour in quanta: its parity is that of its code
    match rounding:
        case "nearest-even":
            up = fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and steps % 2 == 1)
        case "half-away":
            up = fraction >= Fraction(1, 2)
        case "toward-zero":
            up = False
        case "stochastic":
            up = fraction > Fraction(uniform)
        case _:
            raise unknown("rounding", rounding, ROUNDINGS)
    result = float(upper if up else lower)
    if not fmt.zero:
        between_the_smallest = fmt.smallest_normal < x < 2 * fmt.smallest_normal
        if rounding == "nearest-even" and between_the_smallest:  # ml_dtypes and torch go up here
            return 2 * fmt.smallest_normal
        return max(result, fmt.smallest_normal)
    return math.copysign(result, x) if result or fmt.has_negative_zero else 0.0


def _neighbours(magnitude: Fraction, fmt: Format) -> tuple[Fraction, Fraction]:
    """The grid points just below-or-at and above a non-negative number."""
    exponent = fmt.emin
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    quantum = Fraction(2) ** (exponent - fmt.mantissa_bits)
    lower = magnitude // quantum * quantum
    return lower, lower + quantum
