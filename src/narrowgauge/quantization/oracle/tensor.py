"""A tensor that the oracle has quantized."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from narrowgauge.formats.oracle import fl

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReferenceTensor:
    """A tensor that the oracle has quantized.

    Attributes:
        values: A float64 array, the element of each number before scales; 0 in blocks that are not finite.
        codes: The codes of the elements, an integer array.
        scales: The decoded scale of each block, by the index of its first number; NaN where not finite.
        tensor_scales: The scale above that of each block (NVFP4), else 1.
        rest: What clamping took away (zeros elsewhere).
        mean: The mean over tokens that was taken away before.
        second: The blocks that have the second of the cast's elements, by the index of their first number.
        back: What numbers of the second element are multiplied by.
        channels: The channels that are kept in another cast.
        kept: Their numbers in that cast, zeros elsewhere.
    """

    values: np.ndarray
    codes: np.ndarray
    scales: dict[Index, float]
    tensor_scales: dict[Index, float]
    rest: np.ndarray
    mean: np.ndarray | float = 0.0
    second: frozenset[Index] = frozenset()
    back: Fraction = Fraction(1)
    channels: tuple[int, ...] = ()
    kept: np.ndarray | None = None

    @property
    def tensor_scale(self) -> float:
        """The one scale above those of all blocks."""
        (scale,) = set(self.tensor_scales.values()) or {1.0}
        return scale

    def dequantize(self) -> np.ndarray:
        """The numbers that are stored: element, scale and scale above multiplied, the mean added, each step
        rounded to float32; NaN in blocks that are not finite."""
        starts = [sorted({corner[dim] for corner in self.scales}) for dim in range(self.values.ndim)]
        out = np.zeros_like(self.values)
        for i in np.ndindex(self.values.shape):
            if self.kept is not None and i[-1] in self.channels:
                out[i] = self.kept[i]
                continue
            block = tuple(at[bisect_right(at, k) - 1] for at, k in zip(starts, i, strict=True))
            scale = self.scales[block]
            if not math.isfinite(scale):
                out[i] = math.nan
                continue
            number = fl(Fraction(float(self.values[i])) * Fraction(scale))
            number = fl(number * self.back) if block in self.second else number
            number = fl(number * Fraction(self.tensor_scales[block]))
            if isinstance(self.mean, np.ndarray) and self.mean.any():
                number = fl(number + Fraction(float(self.mean[i[-1]])))
            out[i] = float(number) or math.copysign(0.0, self.values[i])
        return out
