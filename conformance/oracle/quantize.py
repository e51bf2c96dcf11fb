"""Quantization by hand: block by block, value by value, in exact rational arithmetic.

This is the reference for `quantize` and produces the conformance vectors. Every value is a `Fraction`, so
nothing is rounded except where the formulas of `scales.py` have fl(): to the nearest float32, at most the
largest. The fast path does not share a line with it.

If the cast has a mean over tokens, it is subtracted first. Then a matrix goes through four steps, each a
function here:

    transform   x D H / sqrt(n) in groups along the contraction, rounded once to the tensor's dtype
    clamp       to its own quantiles, found by rank
    scale       a factor and a stored scale for each block, from its amax
    round       each value times its factor, to the grid of the element format; once per candidate
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from narrowgauge.quantization import Cast
from narrowgauge.quantization import cast as named_cast
from oracle import stages
from oracle.rounding import code_of, fl, round_magnitude, round_scalar
from oracle.scales import corrected_scales, scales_of_block

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReferenceTensor:
    """A tensor quantized by the oracle.

    Attributes:
        values: A float64 array, the element of each value before scales; 0 in blocks that are not finite.
        codes: The codes of the elements, an integer array.
        scales: The decoded scale of each block, by the index of its first element; NaN where not finite.
        tensor_scales: The outer scale of each block (NVFP4), else 1.
        rest: What clamping removed (zeros elsewhere).
        mean: The mean over tokens that was subtracted.
        channels: The channels that are kept in another cast.
        kept: Their values in that cast, zeros elsewhere.
    """

    values: np.ndarray
    codes: np.ndarray
    scales: dict[Index, float]
    tensor_scales: dict[Index, float]
    rest: np.ndarray
    mean: np.ndarray | float = 0.0
    channels: tuple[int, ...] = ()
    kept: np.ndarray | None = None

    @property
    def tensor_scale(self) -> float:
        """The one outer scale above the scales of all blocks."""
        (scale,) = set(self.tensor_scales.values()) or {1.0}
        return scale

    def dequantize(self) -> np.ndarray:
        """The stored values: element times scale times outer scale, plus the mean, each step rounded to
        float32; NaN in blocks that are not finite."""
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
            number = fl(number * Fraction(self.tensor_scales[block]))
            if isinstance(self.mean, np.ndarray) and self.mean.any():
                number = fl(number + Fraction(float(self.mean[i[-1]])))
            out[i] = float(number) or math.copysign(0.0, self.values[i])
        return out


def reference_quantize(
    x: np.ndarray,
    cast: Cast,
    axis: int = -1,
    draws: np.ndarray | None = None,
    signs: Sequence[int] = (),
    encode_scale: float | None = None,
    dtype: str = "fp32",
    scale_draws: np.ndarray | None = None,
    held: float = 0.0,
    channels: Sequence[int] | None = None,
) -> ReferenceTensor:
    """Quantize an array.

    Args:
        x: float32 or bfloat16 values, as floats.
        cast: The cast.
        axis: The axis that blocks lie along.
        draws: For stochastic rounding, the 24 random bits of each value, as an integer.
        signs: The signs of a Hadamard transform whose cast does not name them.
        encode_scale: An encoding scale instead of the tensor's own (delayed scaling).
        scale_draws: The 24 random bits of each block's scale, if scales are rounded stochastically.
        held: The amax to use instead of the tensor's own, if it is held (not 0).
        channels: The channels kept in another cast, instead of those with the largest norms.
        dtype: The dtype of x, to which the transform's result is rounded: "fp32" or "bf16".

    Returns:
        The codes and scales that `quantize` must produce.

    Raises:
        ValueError: A transform whose sums float32 could not hold exactly, so that they would depend on order.
    """
    axis, x = axis % max(x.ndim, 1), x.astype(np.float64)
    if not cast.keep_channels:
        return _quantized(x, cast, axis, draws, signs, encode_scale, dtype, scale_draws, held)
    apart = stages.largest_channels(x, cast.keep_channels) if channels is None else tuple(channels)
    rest, alone = stages.parted(x, apart)
    found = _quantized(rest, cast.of_the_rest, axis, draws, signs, encode_scale, dtype, scale_draws, held)
    return _with_kept(found, alone, apart, cast, axis, dtype)


def _quantized(
    x: np.ndarray,
    cast: Cast,
    axis: int,
    draws: np.ndarray | None,
    signs: Sequence[int],
    encode_scale: float | None,
    dtype: str,
    scale_draws: np.ndarray | None,
    held: float,
) -> ReferenceTensor:
    """`reference_quantize` for float64 values that all use one cast."""
    x, mean = _centered(x, cast, dtype)
    if cast.hadamard:
        named = cast.signs if not isinstance(cast.signs, str) and cast.signs else signs
        x = stages.transform(x, cast.hadamard, axis, named, dtype)
    clamped = stages.clamp(x, cast.outliers) if cast.outliers else x
    blocks = _blocks(x.shape, cast, axis)
    amax = {c: float(np.abs(clamped[block]).max()) for c, block in blocks.items()}
    finite = {c: Fraction(a) for c, a in amax.items() if math.isfinite(a)}
    values, scales, tensor_scales = np.zeros_like(x), {}, {}
    numbers: dict[Index, list[tuple[Fraction, Fraction]]] = {}  # per block: (before, after) rounding
    first = cast.having(scale_rounding="nearest-even") if cast.correct else cast
    uniforms = {c: _uniform(scale_draws, n) for n, c in enumerate(blocks)}
    for c in blocks:
        under = (amax for f, amax in finite.items() if _is_under(f, c, cast, axis))
        over = Fraction(held) or max(under, default=Fraction(0))
        ranges = (range(p.start, min(p.stop, n)) for p, n in zip(blocks[c], x.shape, strict=True))
        block = {i: float(clamped[i]) for i in itertools.product(*ranges)}
        largest = finite.get(c, Fraction(0)), over
        best = _quantize_block(block, largest, first, axis, uniforms[c], draws, encode_scale, c in finite)
        scales[c], tensor_scales[c], factor = best[1:]
        for i, value in best[0].items():
            values[i] = value
        numbers[c] = [(fl(Fraction(block[i]) * factor), Fraction(v)) for i, v in best[0].items()]
    if cast.correct:
        scales |= corrected_scales(scales, numbers, uniforms, cast, axis)
    codes = np.array([code_of(float(v), cast.element) for v in values.ravel()], np.int64).reshape(x.shape)
    rest = x - clamped if cast.outliers else np.zeros_like(x)
    return ReferenceTensor(values, codes, scales, tensor_scales, rest, mean)


def _with_kept(
    rest: ReferenceTensor, alone: np.ndarray, channels: Index, cast: Cast, axis: int, dtype: str
) -> ReferenceTensor:
    """The quantized rest, with the kept channels added in their own cast."""
    kept_cast = named_cast(cast.keep_cast)
    if kept_cast.is_scaled:
        kept = reference_quantize(alone, kept_cast, axis, dtype=dtype).dequantize()
    else:
        kept = np.vectorize(lambda v: round_scalar(v, kept_cast.element), otypes=[np.float64])(alone)
    missing = [(0, longer - n) for longer, n in zip(rest.values.shape, kept.shape, strict=True)]
    return replace(rest, channels=channels, kept=np.pad(kept, missing))


def _centered(x: np.ndarray, cast: Cast, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """(what remains without the mean over tokens, what is added back), if the cast subtracts it."""
    if not cast.center:
        return x, np.zeros(1)
    mean = stages.token_mean(x, dtype)
    if not cast.center_cast:
        return stages.less_mean(x, mean), mean
    added_back = reference_quantize(mean[None], named_cast(cast.center_cast)).dequantize()[0]
    return stages.less_mean(x, mean), added_back


def _quantize_block(
    block: dict[Index, float],
    amax_and_over: tuple[Fraction, Fraction],
    cast: Cast,
    axis: int,
    uniform: Fraction,
    draws: np.ndarray | None,
    encode_scale: float | None,
    is_finite: bool,
) -> tuple[dict[Index, float], float, float, Fraction]:
    """(elements of a block by index, its scale, the outer scale, its factor) for the best candidate."""
    least: Fraction | None = None
    best: tuple[dict[Index, float], float, float, Fraction] = ({}, math.nan, 1.0, Fraction(0))
    for candidate in cast.candidates or (0.0,):
        factor, scale, above = scales_of_block(*amax_and_over, cast, uniform, candidate)
        if not is_finite:
            return {}, math.nan, float(above), factor
        if encode_scale is not None:
            factor = Fraction(encode_scale)
            scale = fl(1 / factor)
        drawn = {i: None if draws is None else int(draws[i]) for i in block}
        elements = {i: _round(v, factor, cast, drawn[i]) for i, v in block.items()}
        error = Fraction(0)
        if cast.candidates:
            error = stages.error(elements, block, (scale, above, amax_and_over[1]), cast, axis)
        if least is None or error < least:
            least, best = error, (elements, float(scale), float(above), factor)
    return best


def _round(x: float, factor: Fraction, cast: Cast, draw: int | None) -> float:
    """Round one value, times its factor, to the element grid."""
    scaled = fl(Fraction(x) * factor)
    rounding, uniform = cast.rounding, Fraction(1, 2)
    if rounding == "stochastic":
        assert draw is not None
        uniform = Fraction(draw, 2**24)
        if cast.random_bits < 24:
            rounding, uniform = (
                "stochastic-hardware",
                Fraction(draw >> (24 - cast.random_bits), 2**cast.random_bits),
            )
    magnitude = float(round_magnitude(abs(scaled), cast.element, rounding, uniform))
    is_negative = math.copysign(1, x) < 0 and (magnitude != 0 or cast.element.has_negative_zero)
    return -magnitude if is_negative else magnitude


def _blocks(shape: Index, cast: Cast, axis: int) -> dict[Index, tuple[slice, ...]]:
    """The elements of each block, by the index of its first element."""
    extent = _extent(shape, cast, axis)
    corners = itertools.product(*(range(0, n, e) for n, e in zip(shape, extent, strict=True)))
    return {c: tuple(slice(i, i + e) for i, e in zip(c, extent, strict=True)) for c in corners}


def _extent(shape: Index, cast: Cast, axis: int) -> list[int]:
    """The extent of a block along each dimension."""
    if cast.block is None:
        return [max(n, 1) for n in shape]
    extent = [1] * len(shape)
    extent[axis] = cast.block[1] or shape[axis]
    if cast.block[0] > 1:
        other = len(shape) - 2 if axis == len(shape) - 1 else len(shape) - 1
        extent[other] = cast.block[0]
    return extent


def _is_under(one: Index, other: Index, cast: Cast, axis: int) -> bool:
    """Whether two blocks share an outer scale, by the indices of their first elements."""
    if cast.tensor_scale == "tensor":
        return True
    is_same_row = one[:axis] + one[axis + 1 :] == other[:axis] + other[axis + 1 :]
    columns = cast.outer_columns
    return is_same_row and (not columns or one[axis] // columns == other[axis] // columns)


def _uniform(draws: np.ndarray | None, number: int) -> Fraction:
    """The random value in [0, 1) for the scale of a block."""
    return Fraction(1, 2) if draws is None else Fraction(int(draws.flat[number]), 2**24)
