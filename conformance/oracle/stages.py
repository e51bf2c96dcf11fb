"""Stages of a cast by hand: kept channels, the mean, the transform, the clamp, and a candidate's error."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from narrowgauge.formats import format
from narrowgauge.quantization import Cast
from oracle.rounding import FP32, fl, round_magnitude, round_scalar

Index = tuple[int, ...]


def largest_channels(x: np.ndarray, share: float) -> tuple[int, ...]:
    """The share of columns, rounded and at least one, with the largest exact sums of squares.

    Ties go to the first columns; columns with a sum of 0 or a non-finite value are never chosen.
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


def token_mean(x: np.ndarray, dtype: str) -> np.ndarray:
    """The exact mean over all dimensions but the last, rounded to x's dtype."""
    columns = [[Fraction(float(v)) for v in x[..., k].ravel()] for k in range(x.shape[-1])]
    means = [sum(column, Fraction(0)) / len(column) for column in columns]
    return np.array([math.copysign(float(round_magnitude(abs(m), format(dtype))), m) for m in means])


def less_mean(x: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Every value minus the mean of its column, rounded to float32; what is 0 has the sign of IEEE 754."""

    def less(v: float, m: float) -> float:
        return float(fl(Fraction(v) - Fraction(m))) or v - m

    return np.vectorize(less, otypes=[np.float64])(x, mean)


SIGNS_16 = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def transform(x: np.ndarray, size: int, axis: int, signs: Sequence[int], dtype: str) -> np.ndarray:
    """The oracle of `hadamard`: x D H / sqrt(size) along `axis`.

    The entries of the matrix are rounded to x's dtype first.
    """
    fmt = format(dtype)
    entry = Fraction(round_scalar(1 / math.sqrt(size), fmt))
    d = tuple(signs) or (SIGNS_16 if size == 16 else (1,) * size)
    x = np.moveaxis(x, axis, -1)
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)])
    groups = x.reshape(-1, size)
    result = np.zeros_like(groups)
    for row, group in enumerate(groups):
        if not np.isfinite(group).all():
            result[row] = math.nan
            continue
        terms = [d[i] * Fraction(float(v)) * entry for i, v in enumerate(group)]
        _require_exact_sums(terms)
        for j in range(size):
            total = sum((-1) ** (i & j).bit_count() * t for i, t in enumerate(terms))
            result[row, j] = math.copysign(round_magnitude(abs(total), fmt), total)
    return np.moveaxis(result.reshape(x.shape), -1, axis)


def _require_exact_sums(terms: Sequence[Fraction]) -> None:
    """Refuse terms if some sum of them, in some order, needs more bits than a float32 has."""
    largest = sum(abs(t) for t in terms)
    if largest == 0:
        return
    quantum = min(Fraction(1, t.denominator) * (t.numerator & -t.numerator) for t in terms if t)
    if largest / quantum > 2**24 or largest > FP32.max or quantum < Fraction(FP32.smallest_subnormal):
        raise ValueError("the sums of this transform are not exact in float32, so they depend on their order")


def clamp(x: np.ndarray, quantile: float) -> np.ndarray:
    """The oracle of the clamp: x, clipped to its elements of ranks (1 - quantile) n and quantile n.

    Ranks count from 0, in ascending order.
    """
    ranked = np.sort(x.ravel())
    low, high = ranked[int((1 - quantile) * x.size)], ranked[min(int(quantile * x.size), x.size - 1)]
    return np.clip(x, low, high)


def error(
    elements: Mapping[Index, float],
    x: Mapping[Index, float],
    scales: tuple[Fraction, Fraction, Fraction],
    cast: Cast,
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
    if cast.choose == "max":
        return max(errors.values())
    rows: dict[Index, Fraction] = {}
    for i in sorted(errors):  # along a row from left to right
        row = i[:axis] + i[axis + 1 :]
        error = errors[i] if cast.choose == "mae" else fl(errors[i] * errors[i])
        rows[row] = fl(rows.get(row, Fraction(0)) + error)
    height = cast.block[0] if cast.block else 1
    return _halved([*rows.values(), *[Fraction(0)] * (height - len(rows))])


def _error(element: float, x: float, scales: tuple[Fraction, Fraction, Fraction], cast: Cast) -> Fraction:
    scale, above, over = scales
    seen = fl(Fraction(element) * scale)
    if cast.has_nvfp4_scales:
        largest = fl(Fraction(cast.target * cast.element.max * cast.headroom))
        seen = fl(fl(seen * over) / largest)
    elif cast.tensor_scale != "none":
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
