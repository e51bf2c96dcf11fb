"""GGUF files: the header, the types of tensors, and a writer.

    "GGUF", version 3 (uint32), tensors (uint64), keys (uint64)
    each key      name, type (uint32), value; a text is its length (uint64) and UTF-8
    each tensor   name, dimensions (uint32), sizes (uint64, columns first), type (uint32), offset (uint64)
    the data      from a multiple of `general.alignment` (32) on, each tensor on such a multiple

    type    block   bytes of a block
    F32, F16, BF16  1
    Q8_0    32      d fp16, 32 int8                                         w = d * q
    MXFP4   32      s E8M0, 16 bytes: element i low, i + 16 high            w = 2^(s - 127) * q
    NVFP4   64      4 scales UE4M3, 4 x 8 bytes: element i low, i + 8 high  w = s * q * scale of the tensor

The scale of an NVFP4 tensor NAME.weight is a separate tensor, NAME.scale (fp32, 1); 1 without it. Both
4-bit types hold E2M1 codes, in another order than the bytes of other layouts. Nothing in a file is executed,
and lengths are checked against the file before memory is allocated.

(Sources: ggml-org/ggml, docs/gguf.md; ggml-org/llama.cpp, ggml-common.h and gguf-py 0.19, `quants.py`.)
"""

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
#: (number, elements of a block, bytes of a block) of each type of ggml that still exists.
TYPES: Mapping[str, tuple[int, int, int]] = {
    **{"F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "F64": (28, 1, 8)},
    **{"I8": (24, 1, 1), "I16": (25, 1, 2), "I32": (26, 1, 4), "I64": (27, 1, 8)},
    **{"Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24)},
    **{"Q8_0": (8, 32, 34), "Q8_1": (9, 32, 40)},
    **{"Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144)},
    **{"Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "Q8_K": (15, 256, 292)},
    **{"IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74), "IQ3_XXS": (18, 256, 98)},
    **{"IQ1_S": (19, 256, 50), "IQ4_NL": (20, 32, 18), "IQ3_S": (21, 256, 110)},
    **{"IQ2_S": (22, 256, 82), "IQ4_XS": (23, 256, 136), "IQ1_M": (29, 256, 56)},
    **{"TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66), "Q1_0": (41, 128, 18)},
    **{"MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36)},
}
_NAMES = {number: name for name, (number, _, _) in TYPES.items()}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_UINT32, _INT32, _FLOAT32, _BOOL = 4, 5, 6, 7


class GgufError(ValueError):
    """A header that cannot be read; with the reason."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file: the name of its type, its shape with the columns last, its bytes."""

    name: str
    type: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass
class GgufFile:
    """The contents of a file, and (tensor, sentence) for each tensor that cannot be read."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: list[GgufTensor] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_gguf(path: Path) -> GgufFile:
    """The keys and tensors of a file, whose bytes are mapped.

    Raises:
        GgufError: The header ends early, or is of another version.
    """
    whole = np.memmap(path, np.uint8, "r")
    header = _Header(whole)
    header.skip(4)
    version, tensors, keys = header.take("<IQQ")
    if version not in (2, VERSION):
        raise GgufError(f"version {version} of GGUF, and 2 and 3 are read")
    found = GgufFile()
    for _ in range(keys):
        name = header.text()
        found.metadata[name] = header.value(*header.take("<I"))
    entries = [header.entry() for _ in range(tensors)]
    alignment = found.metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise GgufError(f"general.alignment = {alignment!r}")
    start = -(-header.at // alignment) * alignment
    for name, shape, number, offset in entries:
        kind = _NAMES.get(number)
        if kind is None:
            found.faults.append((name, f"type {number}, which ggml does not have"))
            continue
        _, block, size = TYPES[kind]
        columns = shape[-1] if shape else 1
        nbytes = math.prod(shape) // block * size
        if columns % block:
            found.faults.append((name, f"rows of {columns}, and a block of {kind} has {block} elements"))
        elif start + offset + nbytes > len(whole):
            found.faults.append((name, f"it ends beyond the {len(whole)} bytes of the file: it was cut off"))
        else:
            data = whole[start + offset : start + offset + nbytes]
            found.tensors.append(GgufTensor(name, kind, shape, data))
    return found


class _Header:
    """A cursor over the bytes of a header."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data, self.at = data, 0

    def skip(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise GgufError("the header ends early: the file was cut off")
        self.at += count
        return self.data[self.at - count : self.at].tobytes()

    def take(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.skip(struct.calcsize(layout)))

    def text(self) -> str:
        return self.skip(*self.take("<Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _LIST:
            inner, count = self.take("<IQ")
            if inner in _SCALARS:
                size = struct.calcsize("<" + _SCALARS[inner])
                return list(struct.unpack(f"<{count}{_SCALARS[inner]}", self.skip(size * count)))
            if inner != _TEXT:
                raise GgufError(f"a list of values of type {inner}")
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise GgufError(f"a value of type {kind}")
        return self.take("<" + _SCALARS[kind])[0]

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text()
        (axes,) = self.take("<I")
        if axes > 8:
            raise GgufError(f"tensor {name!r} has {axes} dimensions")
        sizes = self.take(f"<{axes}Q")
        number, offset = self.take("<IQ")
        return name, tuple(reversed(sizes)), number, offset


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Iterable[GgufTensor]) -> None:
    """Write a new file of version 3.

    The values of `metadata` are texts, booleans, floats (stored as float32), ints (as uint32; as int32 if
    negative or in a list) and lists of one of them; an empty list is one of texts.
    """
    tensors = list(tensors)
    head = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, data = _packed(value)
        head += [_text(key), struct.pack("<I", kind), data]
    offset = 0
    for tensor in tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        head += [_text(tensor.name), sizes, struct.pack("<IQ", TYPES[tensor.type][0], offset)]
        offset += tensor.data.size + -tensor.data.size % ALIGNMENT
    header = b"".join(head)
    with path.open("xb") as file:
        file.write(header + bytes(-len(header) % ALIGNMENT))
        for tensor in tensors:
            file.write(tensor.data.tobytes() + bytes(-tensor.data.size % ALIGNMENT))


def _text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _packed(value: Any) -> tuple[int, bytes]:
    """The type and bytes of a value."""
    match value:
        case str():
            return _TEXT, _text(value)
        case bool():
            return _BOOL, struct.pack("<?", value)
        case int():
            return (_INT32, struct.pack("<i", value)) if value < 0 else (_UINT32, struct.pack("<I", value))
        case float():
            return _FLOAT32, struct.pack("<f", value)
        case list() | tuple():
            packed = [_packed(item) for item in value]
            kinds = {kind for kind, _ in packed} or {_TEXT}
            if kinds <= {_UINT32, _INT32}:
                kinds, packed = {_INT32}, [(_INT32, struct.pack("<i", item)) for item in value]
            assert len(kinds) == 1, value
            return _LIST, struct.pack("<IQ", *kinds, len(packed)) + b"".join(data for _, data in packed)
        case _:
            raise AssertionError(f"{value!r} has no type in GGUF")
