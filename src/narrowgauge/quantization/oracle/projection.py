"""Scales corrected by hand, so that a group projected on itself is itself (MS-EDEN)."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from narrowgauge.formats.oracle import fl
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.oracle.scales import rounded

Index = tuple[int, ...]


def corrected_scales(
    scales: Mapping[Index, float],
    numbers: Mapping[Index, Sequence[tuple[Fraction, Fraction]]],
    uniforms: Mapping[Index, Fraction],
    cast: Cast,
    axis: int,
) -> dict[Index, float]:
    """The scale of each block by the index of its first number, NaN where it was.

    Args:
        scales: The scales to the nearest.
        numbers: The numbers of each block in units of its scale, before and after rounding.
        uniforms: The random number in [0, 1) of each scale.
        cast: The cast.
        axis: The axis that groups lie along.
    """
    assert cast.block is not None
    size = cast.hadamard.size or cast.block[1]
    groups: dict[Index, list[Index]] = {}
    for c in sorted(scales):
        groups.setdefault((*c[:axis], c[axis] // size, *c[axis + 1 :]), []).append(c)
    corrected = {}
    for blocks in groups.values():
        seen = [numbers[c] if scales[c] else () for c in blocks]  # under a scale of 0 nothing is seen
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
    """One after the other, each sum rounded to float32."""
    total = Fraction(0)
    for term in terms:
        total = fl(total + term)
    return total
