"""Spearman's rank correlation: whether two lists of values order the same things in the same way."""

import math
from collections.abc import Sequence


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of the ranks of two lists of equal length; equal values share their mean rank.

    1 is the same order, -1 the reverse; NaN if all values of a list are equal.

    >>> round(rank_correlation([1, 2, 3], [10, 30, 20]), 9)
    0.5
    """
    from scipy.stats import spearmanr  # takes a second to import

    return float(spearmanr(a, b).statistic) if min(len(set(a)), len(set(b))) > 1 else math.nan
