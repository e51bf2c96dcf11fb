"""Quantization as one would do it by hand: block by block, element by element, in numpy scalars.

The judge of `quantize`. Scales follow the formulas of `scales.py` literally, with every intermediate
rounded to float32 where the formula says fl(); powers of two and logarithms are exact integers.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np

from narrowgauge.formats import Format, format
from narrowgauge.formats.oracle import round_scalar
from narrowgauge.quantization.cast import Cast

f32 = np.float32
FLOAT_MAX = np.finfo(f32).max


@dataclass(frozen=True, slots=True)
class ByHand:
    """What the oracle finds: element values, the scale of each block's first index, the tensor scale."""

    values: np.ndarray
    scales: dict[tuple[int, ...], float]
    tensor_scale: float


def quantize_by_hand(x: np.ndarray, cast: Cast, axis: int = -1) -> ByHand:
    """Quantize a float32 array; blocks are found by index arithmetic."""
    axis %= max(x.ndim, 1)
    extent = _extent(x.shape, cast, axis)
    corners = list(itertools.product(*(range(0, n, e) for n, e in zip(x.shape, extent, strict=True))))
    block = {c: tuple(slice(i, i + e) for i, e in zip(c, extent, strict=True)) for c in corners}
    amax = {c: f32(np.abs(x[block[c]]).max()) for c in corners}
    finite = [a for a in amax.values() if np.isfinite(a)]
    S, tensor_scale = _tensor_scale(max(finite, default=f32(0)), cast)
    values, scales = np.zeros_like(x), {}
    with np.errstate(all="ignore"):
        for c in corners:
            if not np.isfinite(amax[c]):
                scales[c] = math.nan
                continue
            encode, scales[c] = _block_scale(amax[c], S, cast)
            scaled = (x[block[c]] * encode).astype(f32)
            rounded = [round_scalar(_saturate(float(v), cast.element), cast.element) for v in scaled.ravel()]
            values[block[c]] = np.array(rounded, dtype=f32).reshape(scaled.shape)
    return ByHand(values, scales, tensor_scale)


def _extent(shape: tuple[int, ...], cast: Cast, axis: int) -> list[int]:
    if cast.block is None:
        return list(shape)
    extent = [1] * len(shape)
    extent[axis] = cast.block[1] or shape[axis]
    if cast.block[0] > 1:
        other = len(shape) - 2 if axis == len(shape) - 1 else len(shape) - 1
        extent[other] = cast.block[0]
    return extent


def _saturate(v: float, fmt: Format) -> float:
    return float(min(max(v, -fmt.max), fmt.max))


def _tensor_scale(amax: np.float32, cast: Cast) -> tuple[np.float32, float]:
    if cast.scale != "e4m3" or amax == 0:
        return f32(1), 1.0
    largest = f32(448 * cast.element.max * cast.headroom)
    with np.errstate(over="ignore"):
        S = min(largest / amax, FLOAT_MAX)
    return S, float(amax / largest if S < FLOAT_MAX else f32(1) / S)


def _block_scale(amax: np.float32, S: np.float32, cast: Cast) -> tuple[np.float32, float]:
    """(factor before rounding, decoded scale) of a block."""
    match cast.scale:
        case "fp32":
            encode = f32(1) if amax == 0 else min(f32(cast.element.max) / amax, FLOAT_MAX)
            if cast.power_of_two:
                encode = f32(2.0 ** (math.frexp(float(encode))[1] - 1))
            return encode, float(f32(1) / encode)
        case "e8m0":
            exponent = min(max(_exponent(float(amax), cast), -127), 127)
            return f32(2.0**-exponent), 2.0**exponent
        case _:
            sixth = f32(1 / (cast.element.max * cast.headroom))
            scale = round_scalar(min(float(amax * (S * sixth)), 448.0), format("e4m3"))
            encode = f32(1) / (f32(scale) * (f32(1) / S))
            return min(encode, FLOAT_MAX), scale


def _exponent(amax: float, cast: Cast) -> int:
    """The exponent of the E8M0 scale: integer arithmetic on the exact binary expansion."""
    if amax == 0:
        return -127
    element = cast.element
    mantissa, exponent = math.frexp(amax)  # amax = mantissa * 2^exponent, 1/2 <= mantissa < 1
    match cast.scale_rule:
        case "floor":
            return exponent - 1 - element.emax
        case "ceil":
            return exponent - (mantissa == 0.5) - element.emax
        case "even":
            return exponent - 1 + (mantissa >= 1 - 2.0 ** -(element.fraction_bits + 2)) - element.emax
        case _:
            mantissa, exponent = math.frexp(float(f32(amax) * f32(1 / element.max)))
            return exponent - (mantissa == 0.5) if mantissa else -127
