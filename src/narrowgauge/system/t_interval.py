"""Confidence interval of a mean over a few seeds, by Student's t.

The mean of n differences with sample deviation s lies within t s / sqrt(n) of the true mean in 95 of 100
experiments, if the differences are roughly normal; t is the 97.5 % quantile with n - 1 degrees of freedom:
12.7 for two seeds, 4.30 for three, 2.78 for five, 1.96 in the limit. Two seeds prove almost nothing, as the
factor shows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

CONFIDENCE = 0.95


@cache
def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t within which a Student t variable lies with probability `confidence`.

    >>> round(t_quantile(2), 3), round(t_quantile(4), 3)
    (4.303, 2.776)
    """
    from scipy.special import stdtrit  # here, because the library imports `Interval` and has no scipy

    return float(stdtrit(degrees, (1 + confidence) / 2))


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its confidence interval; both ends are NaN for fewer than two values."""

    mean: float
    low: float
    high: float

    def as_json(self) -> dict[str, float | None]:
        """The three numbers; None for a non-finite one, which JSON cannot express."""
        numbers = {"mean": self.mean, "low": self.low, "high": self.high}
        return {name: x if math.isfinite(x) else None for name, x in numbers.items()}


def interval(values: Sequence[float]) -> Interval:
    """The confidence interval of the mean of `values`.

    >>> interval([2.0, 2.0, 2.0])
    Interval(mean=2.0, low=2.0, high=2.0)
    """
    n, half = len(values), math.nan
    mean = sum(values) / n  # passes infinity and NaN through; fsum raises on them
    if n > 1 and math.isfinite(mean):
        center = math.fsum(values) / n
        deviation = math.sqrt(math.fsum((v - center) ** 2 for v in values) / (n - 1))
        half = t_quantile(n - 1) * deviation / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)
