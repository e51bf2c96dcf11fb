"""The choice among candidates: each block is quantized with all of them and keeps the best.

Candidates are magnitudes that the block's amax may be mapped to (4/6; arXiv 2512.02010), or two element
formats. `block_scales` makes the choice, `passes.errors` computes the errors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from narrowgauge.formats.oracle import fl
from narrowgauge.quantization.stages import Names, Rules, Stage

Index = tuple[int, ...]
ERRORS = ("mae", "mse", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Stage):
    """The candidates of a block, and the error that decides among them.

    Attributes:
        candidates: Element magnitudes, such as (6, 4), that a block's amax may be mapped to; () for only the
            largest element.
        by: "mae" or "mse" (mean absolute or squared error of the block), or "max" (its largest error); ties
            go to the first candidate. "" without candidates.
    """

    candidates: tuple[float, ...] = ()
    by: str = ""
    KEYS: ClassVar[Mapping[str, str]] = {"candidates": "candidates", "choose": "by"}
    NAMES: ClassVar[Names] = {"choice": ("by", ("", *ERRORS))}

    def rules(self) -> Rules:
        """The rules of its keys."""
        return [
            ("candidates", not self.candidates or bool(self.by), "a choice is missing; add choose = 'mae'"),
            (
                "choose",
                not self.by or bool(self.candidates),
                "there are no candidates; add candidates = [6, 4]",
            ),
        ]


def error_by_hand(
    elements: Mapping[Index, float],
    x: Mapping[Index, float],
    scales: tuple[Fraction, Fraction, Fraction],
    cast: Any,
    axis: int,
) -> Fraction:
    """The error of a block by the cast's criterion, every operation rounded to float32.

    Args:
        elements: The elements by index, without their scale.
        x: The values that they quantize, by index.
        scales: The block's scale, the outer scale, and the amax that the outer scale comes from.
        cast: The cast.
        axis: The axis along which errors are added first.
    """
    errors = {i: _error(elements[i], x[i], scales, cast) for i in x}
    if cast.choice.by == "max":
        return max(errors.values())
    rows: dict[Index, Fraction] = {}
    for i in sorted(errors):  # along a row from left to right
        row = i[:axis] + i[axis + 1 :]
        error = errors[i] if cast.choice.by == "mae" else fl(errors[i] * errors[i])
        rows[row] = fl(rows.get(row, Fraction(0)) + error)
    height = cast.block[0] if cast.block else 1
    return _halved([*rows.values(), *[Fraction(0)] * (height - len(rows))])


def _error(element: float, x: float, scales: tuple[Fraction, Fraction, Fraction], cast: Any) -> Fraction:
    scale, above, over = scales
    seen = fl(Fraction(element) * scale)
    if cast.scales.are_nvfp4:
        largest = fl(Fraction(cast.target * cast.element.max * cast.scales.headroom))
        seen = fl(fl(seen * over) / largest)
    elif cast.scales.outer != "none":
        seen = fl(seen * above)
    return abs(fl(seen - Fraction(x)))


def _halved(errors: Sequence[Fraction]) -> Fraction:
    """The sum of the rows' errors: pairwise halves while their number is even, then one by one."""
    while len(errors) > 1 and len(errors) % 2 == 0:
        half = len(errors) // 2
        errors = [fl(a + b) for a, b in zip(errors[:half], errors[half:], strict=True)]
    total = errors[0]
    for error in errors[1:]:
        total = fl(total + error)
    return total
