"""The mean over tokens: subtracted before a tensor is quantized, added to the operand in high precision.

Mean-residual splitting: the residual has a smaller range than x, and the mean is a single row.

    x = mean + rest             operand  Q(rest) + mean
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from narrowgauge.formats import format
from narrowgauge.formats.oracle import fl, round_magnitude
from narrowgauge.quantization.stages import Names, Rules, Transform

if TYPE_CHECKING:
    import numpy as np


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


def token_mean_by_hand(x: np.ndarray, dtype: str) -> np.ndarray:
    """The exact mean over all dimensions but the last, rounded to x's dtype."""
    import numpy as np

    columns = [[Fraction(float(v)) for v in x[..., k].ravel()] for k in range(x.shape[-1])]
    means = [sum(column, Fraction(0)) / len(column) for column in columns]
    return np.array([math.copysign(float(round_magnitude(abs(m), format(dtype))), m) for m in means])


def less_mean_by_hand(x: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Every value minus the mean of its column, rounded to float32."""
    import numpy as np

    return np.vectorize(lambda v, m: float(fl(Fraction(v) - Fraction(m))), otypes=[np.float64])(x, mean)
