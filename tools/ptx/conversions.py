"""What `cvt` computes.

Narrow formats are rounded among the values of all their codes: a number goes to the code whose value is
nearest, a number midway to the even one. `.satfinite` maps infinity, and all that exceeds the format, to its
largest value; NaN is 0x7F in E4M3 and E5M2. Of two sources the first is the upper half.
"""

from typing import Any

import numpy as np

from ptx.floats import canonical, saturated, to_bf16, to_half, widen
from ptx.types import TYPES, Elementwise

#: Of an FP8 format: bits of the mantissa, bias of the exponent, the code of its largest number.
FP8 = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B)}
FP8_NAN = 0x7F
#: From integers to integers: of the sign of the source, if the target is wider.
INTEGERS = [("s32", "s16"), ("s64", "s32"), ("u16", "u32"), ("u32", "u16"), ("u32", "u64"), ("u64", "u32")]


def values_of(name: str) -> np.ndarray[Any, Any]:
    """The values of codes 0 to 127, float64; those above the largest number are infinite or NaN."""
    mantissa_bits, bias, largest = FP8[name]
    code = np.arange(128)
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    whole = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    values = whole * 2.0 ** (np.maximum(exponent, 1) - bias - mantissa_bits)
    values[largest + 1 :] = np.nan
    if name == "e5m2":
        values[largest + 1] = np.inf
    return values


def to_fp8(name: str, x):
    """Codes of floating-point values, `.rn.satfinite`."""
    *_, largest = FP8[name]
    values = values_of(name)[: largest + 1]
    middles = (values[1:] + values[:-1]) / 2
    size = np.abs(x.astype(np.float64))
    code = np.searchsorted(middles, size)  # of a number midway, the lower
    is_midway = size == middles[np.minimum(code, largest - 1)]
    code = code + (is_midway & (code & 1 == 1) & (code < largest))
    code = np.where(np.isnan(x), FP8_NAN, code | np.where(np.signbit(x), 0x80, 0))
    return code.astype(np.uint8)


def from_fp8(name: str, codes):
    """The values of codes as float16, exactly; NaN is 0x7FFF."""
    values = to_half(values_of(name)[codes & 0x7F])
    return np.where((codes >> 7 == 1) & ~np.isnan(values), -values, values)


def _pair(function: Any) -> Any:
    """Two numbers into the halves of a register, the first into the upper one."""

    def join(upper, lower):
        high, low = function(upper), function(lower)
        bits = high.dtype.itemsize * 8
        to = {8: np.uint16, 16: np.uint32}[bits]
        high, low = (half.view(f"u{half.dtype.itemsize}").astype(to) for half in (high, low))
        return high << to(bits) | low

    return join


def _both(function: Any, of: Any) -> Any:
    """Each half of a register, of the dtype `of`, into a half of another."""

    def convert(packed):
        halves = function(packed[:, None].view(of))
        return np.ascontiguousarray(halves).view({2: np.uint32, 1: np.uint16}[halves.dtype.itemsize])[:, 0]

    return convert


def to_half_toward_zero(x):
    """float32 values as float16, `.rz`: what exceeds the format is its largest number."""
    near = to_half(x)
    is_beyond = np.abs(near.astype(np.float64)) > np.abs(x.astype(np.float64))
    return np.where(is_beyond, np.nextafter(near, np.float16(0)), near)


def _to_integer(x):
    """int32, toward zero, saturated; NaN is 0."""
    cut = np.clip(np.trunc(x.astype(np.float64)), -(2.0**31), 2.0**31 - 1)
    return np.where(np.isnan(cut), 0, cut).astype(np.int32)


def _integer_to_bf16(x):
    """Rounded once: to an odd float32 first."""
    near = x.astype(np.float32)
    is_cut = (near != x.astype(np.float64)) & (near.view(np.uint32) & 1 == 0)
    down = near.astype(np.float64) > x
    step = np.where(is_cut, np.where(down, -1, 1), 0).astype(np.int32)
    return to_bf16((near.view(np.int32) + step).view(np.float32))


def _table() -> dict[str, Elementwise]:
    table = {
        "cvt.f32.bf16": Elementwise(lambda x: canonical(widen(x)), "f32", ("bf16",)),
        "cvt.f32.f16": Elementwise(lambda x: canonical(x.astype(np.float32)), "f32", ("f16",)),
        "cvt.rn.bf16.f32": Elementwise(to_bf16, "bf16", ("f32",)),
        "cvt.rn.f16.f32": Elementwise(to_half, "f16", ("f32",)),
        "cvt.rz.f16.f32": Elementwise(to_half_toward_zero, "f16", ("f32",)),
        "cvt.rn.bf16x2.f32": Elementwise(_pair(to_bf16), "b32", ("f32", "f32")),
        "cvt.rn.f16x2.f32": Elementwise(_pair(to_half), "b32", ("f32", "f32")),
        "cvt.rz.f16x2.f32": Elementwise(_pair(to_half_toward_zero), "b32", ("f32", "f32")),
        "cvt.rzi.s32.f32": Elementwise(_to_integer, "s32", ("f32",)),
        "cvt.rzi.f32.f32": Elementwise(lambda x: canonical(np.trunc(x)), "f32", ("f32",)),
        "cvt.rn.bf16.u32": Elementwise(_integer_to_bf16, "bf16", ("u32",)),
        "cvt.ftz.sat.f32.f32": Elementwise(saturated, "f32", ("f32",)),
    }
    for name in FP8:

        def code(x, name=name):
            return to_fp8(name, x)

        def value(codes, name=name):
            return from_fp8(name, codes)

        table[f"cvt.rn.satfinite.{name}x2.f32"] = Elementwise(_pair(code), "b16", ("f32", "f32"))
        table[f"cvt.rn.satfinite.{name}x2.f16x2"] = Elementwise(_both(code, np.float16), "b16", ("b32",))
        table[f"cvt.rn.f16x2.{name}x2"] = Elementwise(_both(value, np.uint8), "b32", ("b16",))
    for kind in ("s32", "u32"):
        table[f"cvt.rn.f32.{kind}"] = Elementwise(lambda x: x.astype(np.float32), "f32", (kind,))
    for to, source in INTEGERS:
        table[f"cvt.{to}.{source}"] = Elementwise(lambda x, to=TYPES[to]: x.astype(to), to, (source,))
    return table


CONVERSIONS = _table()
