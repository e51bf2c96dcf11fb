"""GGUF files, read and written by the package of llama.cpp, `gguf`.

    type    block   bytes of a block
    F32, F16, BF16  1
    Q8_0    32      d fp16, 32 int8                                         w = d * q
    MXFP4   32      s E8M0, 16 bytes: element i low, i + 16 high            w = 2^(s - 127) * q
    NVFP4   64      4 scales UE4M3, 4 x 8 bytes: element i low, i + 8 high  w = s * q * scale of the tensor

The scale of an NVFP4 tensor NAME.weight is a separate tensor, NAME.scale (fp32, 1); 1 without it. Both
4-bit types hold E2M1 codes, in another order than the bytes of other layouts. Nothing in a file is executed.

(Sources: ggml-org/ggml, docs/gguf.md; ggml-org/llama.cpp, ggml-common.h.)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data.sources.records import package

_MAGIC = b"GGUF"
_OWN = "GGUF."  # prefix of the reader's own fields, which are not keys of the file


@dataclass(frozen=True)
class StoredRows:
    """A tensor as the bytes of a type."""

    type: str  # ggml's name of the type
    data: NDArray[np.uint8]  # (length of the first dimension, bytes of each)
    shape: tuple[int, ...]  # (N, K), (N,) of a vector, or (E, N, K) of the matrices of experts
    # the scale of a matrix, which multiplies all values; a file holds it as another tensor
    scale: float | None = None

    def at(self, rows: NDArray[np.intp]) -> "StoredRows":
        """Some of the rows, in the order of their numbers."""
        return replace(self, data=self.data[rows], shape=(len(rows), *self.shape[1:]))


@dataclass(frozen=True)
class GgufFile:
    """The contents of a file: its keys, and its tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredRows]


def library() -> Any:
    """The package, imported; a `UserError` if it is not installed."""
    return package("gguf", "a GGUF file", "gguf")


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF."""
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


def block_of(kind: str) -> tuple[int, int]:
    """(elements, bytes) of a block of a type."""
    gguf = library()
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(elements), int(size)


def is_readable(kind: str) -> bool:
    """Whether the package decodes a type."""
    gguf, block = library(), np.zeros((1, block_of(kind)[1]), np.uint8)
    try:
        with np.errstate(all="ignore"):
            gguf.quants.dequantize(block, gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return True


def read_gguf(path: Path) -> GgufFile:
    """The keys and tensors of a file, whose bytes are mapped; a `UserError` if it is damaged."""
    gguf = library()

    class Bounded(gguf.GGUFReader):  # type: ignore[misc,name-defined]
        """The reader, which refuses what reaches beyond the file: numpy would cut it without a word."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if not offset <= end <= len(self.data):
                raise ValueError(f"it ends beyond the {len(self.data)} bytes of the file: it was cut off")
            return super()._get(offset, dtype, count, override_order)

    try:
        reader = Bounded(path)
        metadata = {key: f.contents() for key, f in reader.fields.items() if not key.startswith(_OWN)}
    except (ValueError, LookupError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; fetch it again") from None
    tensors = {}
    for tensor in reader.tensors:
        shape, data = tuple(map(int, reversed(tensor.shape))), tensor.data.reshape(-1).view(np.uint8)
        tensors[tensor.name] = StoredRows(
            tensor.tensor_type.name, data.reshape(shape[0], -1) if shape and shape[0] else data, shape
        )
    return GgufFile(metadata, tensors)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, StoredRows]) -> None:
    """Write a new file of version 3.

    The values of `metadata` are texts, booleans, floats (stored as float32), ints (as uint32; as int32 if
    negative or in a list) and lists of one of them. `general.architecture` is among its keys.
    """
    gguf = library()
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    add = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32}
    for key, value in metadata.items():
        if isinstance(value, list | tuple):
            writer.add_array(key, value or [""])  # an empty list would be left out, and llama.cpp asks for it
        elif key != "general.architecture":
            of_int = writer.add_int32 if isinstance(value, int) and value < 0 else writer.add_uint32
            add.get(type(value), of_int)(key, value)
    for name, tensor in tensors.items():
        data = tensor.data.reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[tensor.type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
