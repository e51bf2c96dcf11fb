"""What instructions on floating point compute.

Each rounds once, to nearest even unless its opcode names another rounding; only `.ftz` flushes subnormal
numbers; a NaN as a result is the canonical one. A fused product and sum is taken in double precision, rounded
to odd: rounded again, to 24 bits or fewer, the result is that of one rounding (Boldo & Melquiond 2008).

`ex2.approx` and `lg2.approx` are not one function on all GPUs. The ISA bounds their error; here they are the
exact function with an error of that size, a different one for each operand. What is computed from them is
compared under a tolerance, never bit for bit.
"""

from typing import Any

import numpy as np

from ptx.types import TYPES, Elementwise, same

NAN = np.uint32(0x7FFFFFFF).view(np.float32)
_TINY = np.float32(2.0**-126)


def canonical(x):
    """float32 values, every NaN the canonical one."""
    nan = np.isnan(x)
    return np.where(nan, NAN, x) if nan.any() else x


def widen(bits):
    """bf16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x):
    """The bits of float32 values, rounded to nearest even; NaN is 0x7FFF."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def to_half(x):
    """float32 or float64 values rounded to nearest even; NaN is 0x7FFF."""
    return np.where(np.isnan(x), np.uint16(0x7FFF).view(np.float16), x.astype(np.float16))


def flushed(x):
    """Subnormal numbers become zeros of their sign."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


def odd_sum(product, c):
    """product + c in float64, the last bit odd if it is inexact."""
    total = product + c
    part = total - product
    rest = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    is_cut = np.isfinite(total) & (rest != 0) & (bits & 1 == 0)
    return (bits + np.where(is_cut, np.where((rest > 0) == (total > 0), 1, -1), 0)).view(np.float64)


def fused(a, b, c):
    """a * b + c of float32 (or narrower) values in float64, to be rounded once more."""
    return odd_sum(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))


def fma(a, b, c):
    """a * b + c of float32 values, rounded once, to nearest even."""
    return canonical(fused(a, b, c).astype(np.float32))


def saturated(x):
    """In [0, 1], subnormal numbers flushed; NaN is 0."""
    x = flushed(x)
    return np.where(x > 0, np.minimum(x, np.float32(1)), np.float32(0))


def fma_down(a, b, c):
    """Toward minus infinity, without subnormal numbers."""
    exact = fused(*map(flushed, (a, b, c)))
    near = exact.astype(np.float32)
    return canonical(flushed(np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)))


def _bf16_fma(a, b, c):
    """By way of float32, rounded to odd, which is once."""
    exact = fused(widen(a), widen(b), widen(c))
    near = exact.astype(np.float32)
    bits = near.view(np.int32)
    is_cut = np.isfinite(near) & (near != exact) & (bits & 1 == 0)
    away = np.abs(near.astype(np.float64)) < np.abs(exact)
    return to_bf16((bits + np.where(is_cut, np.where(away, 1, -1), 0)).astype(np.int32).view(np.float32))


def _half_fma(a, b, c):
    return to_half(fused(a, b, c))


def least(x, y):
    """`min`: a number rather than NaN; -0 is less than 0."""
    lower = np.where((x < y) | (x == y) & np.signbit(x) | np.isnan(y), x, y)
    return canonical(lower)


def greatest(x, y):
    """`max`."""
    upper = np.where((x > y) | (x == y) & ~np.signbit(x) | np.isnan(y), x, y)
    return canonical(upper)


def _luck(x):
    """A number in [-1, 1] for each operand, from its bits."""
    mixed = x.view(np.uint32) * np.uint32(0x9E3779B1)
    return (mixed ^ mixed >> np.uint32(15)) * np.float64(2.0**-31) - 1


def exp2_approx(x):
    """2^x within 2^-22 of it; 1 for zeros."""
    error = np.where(x == 0, 0, _luck(x)) * 2.0**-22
    return canonical((np.exp2(x.astype(np.float64)) * (1 + error)).astype(np.float32))


def log2_approx(x):
    """log2(x) within 2^-22 of it, absolutely in (0.5, 2), else relatively."""
    exact = np.log2(x.astype(np.float64))
    error = _luck(x) * 2.0**-22
    near_one = (x > 0.5) & (x < 2)
    return canonical(np.where(near_one, exact + error, exact * (1 + error)).astype(np.float32))


def libdevice_exp(x):
    """`exp` of libdevice for float32, instruction by instruction: what a kernel has where it calls `exp`."""
    scale, log2_e, rest, range_, shift, unshift = np.array(
        [0x3BBB989D, 0x3FB8AA3B, 0x32A57060, 0x437C0000, 0x4B400001, 0xCB40007F], dtype=np.uint32
    ).view(np.float32)
    x = np.asarray(x, dtype=np.float32)
    turns = fma_down(saturated(fma(x, scale, np.float32(0.5))), range_, shift)
    whole = turns + unshift
    fraction = flushed(fma(x, rest, flushed(fma(x, log2_e, -whole))))
    two_to = _flushing(exp2_approx)(fraction)
    return canonical(two_to * (turns.view(np.uint32) << np.uint32(23)).view(np.float32))


def _flushing(function: Any) -> Any:
    return lambda *x: canonical(flushed(function(*map(flushed, x))))


def _in_float32(function: Any) -> Any:
    """A bf16 operation by way of float32: 24 bits are enough that the second rounding changes nothing."""
    return lambda *x: to_bf16(function(*map(widen, x)))


def _compare() -> dict[str, Any]:
    """Comparisons are false if an operand is NaN; those that end in u are true."""
    table: dict[str, Any] = {
        "eq": np.equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "ne": lambda x, y: (x < y) | (x > y),
        "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
        "nan": lambda x, y: np.isnan(x) | np.isnan(y),
    }
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        table[name + "u"] = lambda x, y, f=table[name]: f(x, y) | np.isnan(x) | np.isnan(y)
    return table


def _mixed() -> dict[str, Elementwise]:
    """Make the mixed operations of sm_100: they widen narrow operands, which is exact, and round once."""
    table: dict[str, Elementwise] = {}
    for kind, wide in (("bf16", widen), ("f16", lambda x: x.astype(np.float32))):
        for name, function in (("add", np.add), ("sub", np.subtract)):
            mixed = lambda x, y, f=function, w=wide: canonical(f(w(x), y))  # noqa: E731
            table[f"{name}.rn.f32.{kind}"] = Elementwise(mixed, "f32", (kind, "f32"))
        fused = lambda x, y, z, w=wide: fma(w(x), w(y), z)  # noqa: E731
        table[f"fma.rn.f32.{kind}"] = Elementwise(fused, "f32", (kind, kind, "f32"))
    return table


def _table() -> dict[str, Elementwise]:
    table: dict[str, Elementwise] = {}
    two = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    for name, function in two.items():
        rounded = lambda x, y, f=function: canonical(f(x, y))  # noqa: E731
        for kind in ("f32", "f32x2"):
            table[f"{name}.rn.{kind}"] = same(kind, 2, rounded)
        for kind in ("bf16", "bf16x2"):
            table[f"{name}.rn.{kind}"] = same(kind, 2, _in_float32(function))
        for kind in ("f16", "f16x2"):
            in_half = lambda x, y, f=function: to_half(f(x.astype(np.float32), y.astype(np.float32)))  # noqa: E731
            table[f"{name}.rn.{kind}"] = same(kind, 2, in_half)
    table |= _mixed()
    table["div.rn.f32"] = same("f32", 2, lambda x, y: canonical(x / y))
    table["sqrt.rn.f32"] = same("f32", 1, lambda x: canonical(np.sqrt(x)))
    for kind, function in (("f32", fma), ("bf16", _bf16_fma), ("f16", _half_fma)):
        table[f"fma.rn.{kind}"] = same(kind, 3, function)
        table[f"fma.rn.{kind}x2"] = same(f"{kind}x2", 3, function)
    table["fma.rn.ftz.f32"] = same("f32", 3, _flushing(fma))
    table["fma.rm.ftz.f32"] = same("f32", 3, fma_down)
    for kind, sign in (("f32", 31), ("bf16", 15), ("bf16x2", 15), ("f16", 15), ("f16x2", 15)):
        bits = {"f32": "b32", "f16x2": "b32", "bf16x2": "b32"}.get(kind, "b16")
        mask = TYPES[bits]((1 << sign) if kind[-2:] != "x2" else 0x80008000)
        table[f"abs.{kind}"] = same(bits, 1, lambda x, m=mask: x & ~m)
        table[f"neg.{kind}"] = same(bits, 1, lambda x, m=mask: x ^ m)
    table["min.f32"], table["max.f32"] = same("f32", 2, least), same("f32", 2, greatest)
    for name, function in (("min", least), ("max", greatest)):
        table[f"{name}.f32 of 3"] = same("f32", 3, lambda x, y, z, f=function: f(f(x, y), z))
    for name, function in _compare().items():
        in_bf16 = lambda x, y, f=function: f(widen(x), widen(y))  # noqa: E731
        for kind, compare in (("f32", function), ("f16", function), ("bf16", in_bf16)):
            table[f"setp.{name}.{kind}"] = Elementwise(compare, "pred", (kind, kind))
    table["selp.f32"] = Elementwise(lambda x, y, p: np.where(p, x, y), "b32", ("b32", "b32", "pred"))
    table["ex2.approx.f32"] = same("f32", 1, exp2_approx)
    table["ex2.approx.ftz.f32"] = same("f32", 1, _flushing(exp2_approx))
    table["lg2.approx.f32"] = same("f32", 1, log2_approx)
    return table


FLOATS = _table()
