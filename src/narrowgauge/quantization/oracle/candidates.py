"""The error of a block by hand, by which one of its candidates is chosen (`oracle/quantize.py`)."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from narrowgauge.formats.oracle import fl
from narrowgauge.quantization.cast import Cast

Index = tuple[int, ...]


def error_of_block(
    elements: Mapping[Index, float],
    x: Mapping[Index, float],
    scales: tuple[Fraction, Fraction, Fraction],
    cast: Cast,
    axis: int,
    back: Fraction = Fraction(1),
) -> Fraction:
    """The error of a block by the cast's choice, every operation rounded to float32.

    Args:
        elements: The numbers before scales, by index.
        x: The numbers that they stand for.
        scales: The block's scale, the scale above, and the largest magnitude that the latter comes from.
        cast: The cast.
        axis: The axis along which errors are added first.
        back: What numbers are multiplied by, if they were stretched before they were rounded.
    """
    errors = {i: _error(elements[i], x[i], scales, cast, back) for i in x}
    if cast.choose == "max":
        return max(errors.values())
    rows: dict[Index, Fraction] = {}
    for i in sorted(errors):  # along a row from left to right
        row = i[:axis] + i[axis + 1 :]
        error = errors[i] if cast.choose == "mae" else fl(errors[i] * errors[i])
        rows[row] = fl(rows.get(row, Fraction(0)) + error)
    height = cast.block[0] if cast.block else 1
    return _halved([*rows.values(), *[Fraction(0)] * (height - len(rows))])


def _error(
    element: float, x: float, scales: tuple[Fraction, Fraction, Fraction], cast: Cast, back: Fraction
) -> Fraction:
    scale, above, over = scales
    seen = fl(Fraction(element) * scale)
    if cast.is_nvfp4:
        largest = fl(Fraction(cast.target * cast.element.max * cast.headroom))
        seen = fl(fl(fl(seen * over) * back) / largest)
    elif cast.tensor_scale != "none":
        seen = fl(fl(seen * above) * back)
    else:
        seen = fl(seen * back)
    return abs(fl(seen - Fraction(x)))


def _halved(errors: Sequence[Fraction]) -> Fraction:
    """The sum of the rows' errors: halves are added as long as there are two, what is left one by one."""
    while len(errors) > 1 and len(errors) % 2 == 0:
        half = len(errors) // 2
        errors = [fl(a + b) for a, b in zip(errors[:half], errors[half:], strict=True)]
    total = errors[0]
    for error in errors[1:]:
        total = fl(total + error)
    return total
