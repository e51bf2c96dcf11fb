"""Spearman's rank correlation: whether two lists of values order the same things in the same way."""

import math
from collections.abc import Sequence


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of the ranks of two lists of equal length; equal values share their mean rank.

    1 is the same order, -1 the reverse; NaN if all values of a list are equal.

    >>> rank_correlation([1, 2, 3], [10, 30, 20])
    0.5
    """
    x, y = _ranks(a), _ranks(b)
    middle = (len(x) + 1) / 2
    products = math.fsum((p - middle) * (q - middle) for p, q in zip(x, y, strict=True))
    squares = [math.fsum((r - middle) ** 2 for r in ranks) for ranks in (x, y)]
    return products / math.sqrt(squares[0] * squares[1]) if all(squares) else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, from 1."""
    positions: dict[float, list[int]] = {}
    for position, value in enumerate(sorted(values), start=1):
        positions.setdefault(value, []).append(position)
    return [math.fsum(positions[v]) / len(positions[v]) for v in values]
