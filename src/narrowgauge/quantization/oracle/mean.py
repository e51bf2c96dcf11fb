"""The mean over tokens by hand, and what is left without it."""

import math
from fractions import Fraction

import numpy as np

from narrowgauge.formats import format
from narrowgauge.formats.oracle import fl, round_magnitude


def token_mean(x: np.ndarray, dtype: str) -> np.ndarray:
    """The exact mean over all dimensions but the last, rounded to x's dtype."""
    columns = [[Fraction(float(v)) for v in x[..., k].ravel()] for k in range(x.shape[-1])]
    means = [sum(column, Fraction(0)) / len(column) for column in columns]
    return np.array([math.copysign(float(round_magnitude(abs(m), format(dtype))), m) for m in means])


def less_mean(x: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Every number less the mean of its column, rounded to float32."""
    return np.vectorize(lambda v, m: float(fl(Fraction(v) - Fraction(m))), otypes=[np.float64])(x, mean)
