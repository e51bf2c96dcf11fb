"""Scales by hand, in exact rational arithmetic: see `quantize.py`."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from narrowgauge.formats import Format, format
from narrowgauge.quantization.cast import Cast
from oracle.rounding import FP32, fl, floor_log2, round_magnitude

LARGEST = Fraction(FP32.max)
Index = tuple[int, ...]


def scales_of_block(
    amax: Fraction,
    over: Fraction,
    cast: Cast,
    uniform: Fraction = Fraction(1, 2),
    candidate: float = 0.0,
) -> tuple[Fraction, Fraction, Fraction]:
    """The factor of a block's values (exact where they are divided), its scale, and the outer scale.

    Args:
        amax: The amax of the block.
        over: That of the tensor or the row, for casts with an outer scale.
        cast: The cast.
        uniform: The random value in [0, 1) of a scale that is rounded stochastically.
        candidate: The magnitude that the amax is mapped to; 0 for the largest element.
    """
    aim = Fraction(cast.element.max * cast.headroom)
    if cast.scale == "fp32":
        factor = Fraction(1) if amax == 0 else fl(fl(aim) / amax)
        if cast.power_of_two:
            factor = Fraction(2) ** floor_log2(factor)
        return factor, fl(1 / factor), Fraction(1)
    if cast.scale == "e8m0":
        exponent = min(max(_exponent(amax, cast), -127), 127)
        return Fraction(2) ** -exponent, Fraction(2) ** exponent, Fraction(1)
    if cast.has_nvfp4_scales:
        return _nvfp4(amax, over, cast, uniform, candidate)
    above, quotient = Fraction(1), fl(amax / fl(aim))
    if cast.tensor_scale != "none":
        target = Fraction(cast.target)
        largest = fl(Fraction(float(target) * cast.element.max * cast.headroom))
        above = fl(over / largest) if over else above
        quotient = fl(amax * target / over) if over else Fraction(0)
    if candidate:
        quotient = fl(quotient * fl(Fraction(cast.element.max / candidate)))
    scale, is_zeros = rounded(quotient, cast, uniform)
    divisor = fl(scale * above)
    return (Fraction(0) if is_zeros or divisor == 0 else 1 / divisor), scale, above


def _nvfp4(
    amax: Fraction, over: Fraction, cast: Cast, uniform: Fraction, candidate: float
) -> tuple[Fraction, Fraction, Fraction]:
    """The same in TransformerEngine's order of operations."""
    S, above = Fraction(1), Fraction(1)
    if over:
        largest = fl(Fraction(cast.target * cast.element.max * cast.headroom))
        S = fl(largest / over)
        above = fl(over / largest) if S < LARGEST else fl(1 / S)
    aim = cast.element.max * cast.headroom
    quotient = fl(amax * fl(S * fl(Fraction(1 / aim))))
    if candidate:
        quotient = fl(fl(fl(amax / fl(Fraction(aim))) * S) * fl(Fraction(cast.element.max / candidate)))
    scale, is_zeros = rounded(quotient, cast, uniform)
    if is_zeros and cast.zero_rule == "one":
        return Fraction(0), scale, above
    decode = fl(scale * fl(1 / S))
    return (LARGEST if decode == 0 else fl(1 / decode)), scale, above


def rounded(quotient: Fraction, cast: Cast, uniform: Fraction) -> tuple[Fraction, bool]:
    """(a quotient on the grid of the scales, whether the block is all zeros)."""
    fmt = format(cast.scale)
    scale = round_magnitude(quotient, fmt, cast.scale_rounding, uniform)
    if scale:
        return scale, False
    match cast.zero_rule:
        case "one":
            return Fraction(1), True
        case "smallest":
            return Fraction(fmt.smallest_subnormal), False
        case _:
            return Fraction(0), True


def _exponent(amax: Fraction, cast: Cast) -> int:
    """The exponent of an E8M0 scale, before it is clamped to -127 .. 127."""
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
            share = fl(amax * fl(Fraction(1 / (element.max * cast.headroom))))
            if share == 0:
                return -127
            return floor_log2(share) + (share != Fraction(2) ** floor_log2(share))


def corrected_scales(
    scales: Mapping[Index, float],
    numbers: Mapping[Index, Sequence[tuple[Fraction, Fraction]]],
    uniforms: Mapping[Index, Fraction],
    cast: Cast,
    axis: int,
) -> dict[Index, float]:
    """The corrected scale of each block by the index of its first element; NaN stays NaN.

    Args:
        scales: The scales rounded to nearest.
        numbers: The values of each block in units of its scale, before and after rounding.
        uniforms: The random value in [0, 1) of each scale.
        cast: The cast.
        axis: The axis that groups lie along.
    """
    assert cast.block is not None
    size = cast.hadamard or cast.block[1]
    groups: dict[Index, list[Index]] = {}
    for c in sorted(scales):
        groups.setdefault((*c[:axis], c[axis] // size, *c[axis + 1 :]), []).append(c)
    corrected = {}
    for blocks in groups.values():
        seen = [numbers[c] if scales[c] else () for c in blocks]  # a scale of 0 hides its block
        above = _sum([_sum([fl(t * t) for t, _ in block]) for block in seen])
        below = _sum([_sum([fl(t * q) for t, q in block]) for block in seen])
        factor = fl(above / below) if below else Fraction(1)
        for c in blocks:
            if math.isnan(scales[c]):
                corrected[c] = math.nan
            else:
                corrected[c] = float(rounded(fl(Fraction(scales[c]) * factor), cast, uniforms[c])[0])
    return corrected


def _sum(terms: Sequence[Fraction]) -> Fraction:
    """The sum in order, rounded to float32 after each addition."""
    total = Fraction(0)
    for term in terms:
        total = fl(total + term)
    return total
