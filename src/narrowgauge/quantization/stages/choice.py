"""The choice among candidates: each block is quantized with all of them and keeps the best.

Candidates are magnitudes that the block's amax may be mapped to (4/6; arXiv 2512.02010), or two element
formats. `block_scales` makes the choice, `passes.errors` computes the errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from narrowgauge.quantization.stages import Names, Rules, Stage

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
