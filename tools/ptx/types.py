"""The types of PTX as numpy's, and the description of an instruction that computes elementwise."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Registers hold bits: of the widths of these types.
BITS: dict[str, type] = {
    "pred": np.bool_,
    "b8": np.uint8,
    "b16": np.uint16,
    "b32": np.uint32,
    "b64": np.uint64,
}
TYPES: dict[str, type] = BITS | {
    "u8": np.uint8,
    "s8": np.int8,
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.float16,
    "bf16": np.uint16,  # its bits
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "u64": np.uint64,
    "s64": np.int64,
}
#: Several numbers in one register, the first in its low bits: their number and type.
PACKED = {"f16x2": (2, "f16"), "bf16x2": (2, "bf16"), "f32x2": (2, "f32"), "s16x2": (2, "s16")}


def width(kind: str) -> int:
    """The bytes of a register of a type."""
    count, kind = PACKED.get(kind, (1, kind))
    return count * np.dtype(TYPES[kind]).itemsize


@dataclass(frozen=True)
class Elementwise:
    """What an instruction computes: `function` takes arrays of the types `sources`, gives one of `result`."""

    function: Callable[..., Any]
    result: str
    sources: tuple[str, ...]


def same(kind: str, count: int, function: Callable[..., Any]) -> Elementwise:
    """Operands and result are of one type."""
    return Elementwise(function, kind, (kind,) * count)
