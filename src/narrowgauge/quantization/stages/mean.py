"""The mean over tokens: subtracted before a tensor is quantized, added to the operand in high precision.

Mean-residual splitting: the residual has a smaller range than x, and the mean is a single row.

    x = mean + rest             operand  Q(rest) + mean
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from narrowgauge.quantization.stages import Names, Rules, Transform


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean(Transform):
    """A mean that is quantized separately.

    Attributes:
        over: "tokens", or "" for none.
        cast: The name of a cast that rounds the mean to nearest, as a separate row: blocks lie along its
            channels; "" keeps it wide.
    """

    over: str = ""
    cast: str = ""
    KEYS: ClassVar[Mapping[str, str]] = {"center": "over", "center_cast": "cast"}
    NAMES: ClassVar[Names] = {"center": ("over", ("", "tokens"))}

    def rules(self) -> Rules:
        """The rules of its keys."""
        needs = "no mean is taken away; add center = 'tokens'"
        return [("center_cast", not self.cast or bool(self.over), needs)]
