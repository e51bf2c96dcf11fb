"""What instructions on integers, bits and predicates compute."""

import operator
from typing import Any

import numpy as np

from ptx.types import TYPES, Elementwise, same


def _shifted_left(bits: int) -> Any:
    """A shift by the width or more gives zero."""
    return lambda x, by: np.where(by < bits, x << np.minimum(by, bits - 1).astype(x.dtype), x.dtype.type(0))


def _shifted_right(bits: int) -> Any:
    """... or all signs."""

    def shift(x, by):
        shifted = x >> np.minimum(by, bits - 1).astype(x.dtype)
        is_signed = np.issubdtype(x.dtype, np.signedinteger)
        return shifted if is_signed else np.where(by < bits, shifted, x.dtype.type(0))

    return shift


def _divided(x, y):
    """Toward zero; whatever a GPU gives for a division by zero, it is all ones here."""
    by = np.where(y == 0, x.dtype.type(1), y)
    floor = x // by
    quotient = floor + ((floor * by != x) & ((x < 0) != (by < 0)))
    return np.where(y == 0, ~x.dtype.type(0), quotient.astype(x.dtype))


def extracted(x, start, length):
    """`bfe`: a field; of a signed type with its sign."""
    start, length = (start & 255).astype(np.int64), (length & 255).astype(np.int64)
    is_signed = x.dtype == np.int32
    wide = x.astype(np.int64)
    top = np.minimum(start + length - 1, 31)
    sign = (wide >> top) & 1 if is_signed else np.zeros_like(wide)
    sign = np.where(length == 0, 0, sign)
    field = (wide >> np.minimum(start, 63)) & ((np.int64(1) << np.minimum(length, 32)) - 1)
    from_there = np.clip(top - start + 1, 0, 32)
    field = np.where(start > 31, 0, field & ((np.int64(1) << from_there) - 1))
    field |= np.where(sign == 1, np.int64(-1) << from_there, 0)
    return field.astype(x.dtype)


def permuted(a, b, selector):
    """`prmt`: four bytes of the eight of a and b; the top bit of a selector takes a byte's sign instead."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.uint64(0)
    for place in range(4):
        chosen = (selector >> np.uint32(4 * place)).astype(np.uint64) & np.uint64(15)
        byte = both >> ((chosen & np.uint64(7)) * np.uint64(8)) & np.uint64(255)
        sign = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
        result = result | np.where(chosen >> np.uint64(3), sign, byte) << np.uint64(8 * place)
    return result.astype(np.uint32)


def _widened(kind: str) -> Any:
    to = TYPES[kind[0] + "64"]
    return lambda x, y, *added: sum(added, x.astype(to) * y.astype(to))


_COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def _table() -> dict[str, Elementwise]:
    table: dict[str, Elementwise] = {}
    for kind in ("s32", "u32", "s64", "u64", "s16", "s16x2"):
        for name, function in (("add", operator.add), ("sub", operator.sub)):
            table[f"{name}.{kind}"] = same(kind, 2, function)
    for kind in ("s16", "u16", "s32", "u32", "s64", "u64"):
        table[f"mul.lo.{kind}"] = same(kind, 2, operator.mul)
        table[f"mad.lo.{kind}"] = same(kind, 3, lambda x, y, z: x * y + z)
        table[f"min.{kind}"] = same(kind, 2, np.minimum)
        table[f"max.{kind}"] = same(kind, 2, np.maximum)
    for kind in ("s32", "s64", "u32"):
        table[f"div.{kind}"] = same(kind, 2, _divided)
    table["popc.b32"] = Elementwise(np.bitwise_count, "u32", ("b32",))
    table["neg.s32"] = same("s32", 1, operator.neg)
    for kind in ("s32", "u32"):
        wide = kind[0] + "64"
        table[f"mul.wide.{kind}"] = Elementwise(_widened(kind), wide, (kind, kind))
        table[f"mad.wide.{kind}"] = Elementwise(_widened(kind), wide, (kind, kind, wide))
        table[f"bfe.{kind}"] = Elementwise(extracted, kind, (kind, "u32", "u32"))
    for kind in ("pred", "b16", "b32", "b64"):
        for name, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
            table[f"{name}.{kind}"] = same(kind, 2, function)
        table[f"not.{kind}"] = same(kind, 1, operator.invert)
        table[f"mov.{kind}"] = same(kind, 1, lambda x: x)
    for bits in (16, 32, 64):
        table[f"shl.b{bits}"] = Elementwise(_shifted_left(bits), f"b{bits}", (f"b{bits}", "u32"))
        for letter in "us":
            kind = f"{letter}{bits}"
            table[f"shr.{kind}"] = Elementwise(_shifted_right(bits), kind, (kind, "u32"))
        table[f"mov.u{bits}"] = table[f"mov.b{bits}"]
        table[f"selp.b{bits}"] = Elementwise(
            lambda x, y, p: np.where(p, x, y), f"b{bits}", (f"b{bits}", f"b{bits}", "pred")
        )
    for name, function in _COMPARE.items():
        of_bits = ("b16", "b32", "b64") if name in ("eq", "ne") else ()
        for kind in ("s16", "u16", "s32", "u32", "s64", "u64", *of_bits):
            table[f"setp.{name}.{kind}"] = Elementwise(function, "pred", (kind, kind))
    table["prmt.b32"] = same("b32", 3, permuted)
    return table


INTEGERS = _table()
