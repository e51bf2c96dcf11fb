"""Scales by hand, in exact rational arithmetic: see `quantization/oracle/quantize.py`."""

import math
from collections.abc import Sequence
from fractions import Fraction

from narrowgauge.formats import Format, format
from narrowgauge.formats.oracle import FP32, fl, floor_log2, round_magnitude
from narrowgauge.quantization.cast import Cast

LARGEST = Fraction(FP32.max)
E4M3 = format("e4m3")


def delayed_scale(amaxes: Sequence[float], cast: Cast) -> float:
    """The encoding scale after some steps with these largest magnitudes, the newest last; 1 before any."""
    history = [a for a in amaxes if a > 0 and math.isfinite(a)][-cast.history :]
    if not history:
        return 1.0
    amax = max(history) if cast.history_algorithm == "max" else history[-1]
    return float(fl(fl(Fraction(cast.element.max) / 2**cast.margin) / Fraction(amax)))


def tensor_scale_of(amax: Fraction, cast: Cast) -> tuple[Fraction, Fraction]:
    """The tensor scale S of NVFP4, and the factor that undoes it."""
    if cast.tensor_scale == "none" or amax == 0:
        return Fraction(1), Fraction(1)
    largest = fl(Fraction(448 * cast.element.max * cast.headroom))
    S = fl(largest / amax)
    return S, fl(amax / largest) if S < LARGEST else fl(1 / S)


def block_scale_of(amax: Fraction, S: Fraction, cast: Cast) -> tuple[Fraction, Fraction]:
    """The factor of a block before rounding (exact where it is a quotient), and its decoded scale."""
    match cast.scale:
        case "fp32":
            factor = Fraction(1) if amax == 0 else fl(Fraction(cast.element.max) / amax)
            if cast.power_of_two:
                factor = Fraction(2) ** floor_log2(factor)
            return factor, fl(1 / factor)
        case "e8m0":
            exponent = min(max(_exponent(amax, cast), -127), 127)
            return Fraction(2) ** -exponent, Fraction(2) ** exponent
        case _ if cast.tensor_scale == "none":
            scale = round_magnitude(fl(amax / Fraction(cast.element.max)), format(cast.scale))
            return (1 / scale, scale) if scale else (Fraction(0), Fraction(1))
        case _:
            share = fl(Fraction(1 / (cast.element.max * cast.headroom)))
            scale = round_magnitude(fl(amax * fl(S * share)), E4M3)
            decode = fl(scale * fl(1 / S))
            return LARGEST if decode == 0 else fl(1 / decode), scale


def _exponent(amax: Fraction, cast: Cast) -> int:
    """The exponent of an E8M0 scale, before it is cut to -127 .. 127."""
    if amax == 0:
        return -127
    element: Format = cast.element
    exponent = floor_log2(amax)
    mantissa = amax / Fraction(2) ** exponent  # from 1 to 2
    match cast.scale_rule:
        case "floor":
            return exponent - element.emax
        case "ceil":
            return exponent + (mantissa > 1) - element.emax
        case "even":
            return exponent + (mantissa >= 2 - Fraction(1, 2 ** (element.fraction_bits + 1))) - element.emax
        case _:
            share = fl(amax * fl(Fraction(1 / element.max)))
            if share == 0:
                return -127
            return floor_log2(share) + (share != Fraction(2) ** floor_log2(share))
