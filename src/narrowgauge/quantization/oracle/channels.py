"""Channels that are kept in another cast, by hand: which they are, and the tensor in two parts."""

from fractions import Fraction

import numpy as np


def largest_channels(x: np.ndarray, share: float) -> tuple[int, ...]:
    """The share of columns, rounded and at least one, with the largest exact sums of squares.

    Of equal sums the first columns are taken, and none whose sum is 0, or whose numbers are not all finite.
    """
    columns = [x[..., k].ravel() for k in range(x.shape[-1])]
    finite = [c if np.isfinite(c).all() else np.zeros(0) for c in columns]
    norms = [sum((Fraction(float(v)) ** 2 for v in column), Fraction(0)) for column in finite]
    ranked = sorted(range(len(norms)), key=lambda k: (-norms[k], k))
    return tuple(sorted(k for k in ranked[: max(1, round(share * len(norms)))] if norms[k]))


def parted(x: np.ndarray, channels: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(x with zeros in these columns, x with zeros in all others)."""
    rest, alone = x.copy(), np.zeros_like(x)
    for k in channels:
        rest[..., k] = 0.0
        alone[..., k] = x[..., k]
    return rest, alone
