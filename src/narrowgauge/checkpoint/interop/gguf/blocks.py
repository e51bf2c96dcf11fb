"""Rows of a matrix in the types of ggml (`container.py`): stored values, and the codes of a cast.

    type      the cast whose codes it holds              tensor scale
    MXFP4     E2M1 under E8M0, blocks of 32 columns      -
    NVFP4     E2M1 under E4M3, blocks of 16 columns      fp32, in a separate tensor
    Q8_0      INT8 under E8M0, blocks of 32 columns      -; d = 2^(s - 133) as fp16, which must be exact

Blocks may also span rows: each row then repeats its scale. Codes are moved, never rounded again. All other
values are stored as BF16 or F32, whichever is the narrower one that holds them exactly.

Legend: N rows, K columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from narrowgauge.checkpoint.interop.gguf.container import TYPES
from narrowgauge.data.sources.records import package
from narrowgauge.formats import decode, format
from narrowgauge.quantization import Cast, QTensor
from narrowgauge.quantization import cast as named_cast
from narrowgauge.recipes.cast_layout import layout_of

Bytes = NDArray[np.uint8]
#: The type of each cast's codes, and the columns of a block.
_TYPE_OF = {"mxfp4": ("MXFP4", 32), "nvfp4": ("NVFP4", 16), "mxint8": ("Q8_0", 32)}
PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in PLAIN.items()}
_FP16_EXPONENTS = (-24, 15)  # powers of two that fp16 holds exactly


@dataclass(frozen=True)
class StoredRows:
    """The rows of a matrix, or the elements of a vector, as the bytes of a type.

    Attributes:
        type: The name of the type in `TYPES`.
        data: (N, bytes of a row).
        shape: (N, K), or (N,) of a vector.
        scale: The scale of the tensor, which multiplies all values.
    """

    type: str
    data: Bytes
    shape: tuple[int, ...]
    scale: float | None = None

    def at(self, rows: NDArray[np.intp]) -> "StoredRows":
        """Some of the rows, in the order of their numbers."""
        return replace(self, data=self.data[rows], shape=(len(rows), *self.shape[1:]))


def plain_rows(values: torch.Tensor, dtype: torch.dtype | None = None) -> StoredRows:
    """Values in a dtype, or by default in the narrower of bf16 and fp32 that is exact; vectors in fp32."""
    values = values.detach().float().contiguous()
    if dtype is None:
        is_exact = torch.equal(values.bfloat16().float(), values)
        dtype = torch.bfloat16 if is_exact else torch.float32
    if values.ndim == 1:  # ggml adds and multiplies vectors in fp32
        dtype = torch.float32
    stored = values.to(dtype).view(torch.int32 if dtype == torch.float32 else torch.int16)
    return StoredRows(
        _NAMES[dtype], stored.numpy().view(np.uint8).reshape(len(values), -1), tuple(values.shape)
    )


def type_of(cast: Cast, columns: int) -> str | None:
    """The type that holds the codes of a cast in rows of `columns` columns; None if there is none."""
    layout = layout_of(cast)
    layout.pop("block", None)
    for name, (kind, width) in _TYPE_OF.items():
        known = layout_of(named_cast(name))
        known.pop("block", None)
        if layout == known and cast.block is not None and cast.block[1] == width:
            return kind if columns % TYPES[kind][1] == 0 else None
    return None


def code_rows(q: QTensor, kind: str) -> StoredRows | None:
    """The codes and scales of a quantized matrix in a type of `type_of`; None if fp16 cannot hold a scale."""
    assert q.scale_codes is not None
    assert q.cast.block is not None
    N, K = q.codes.shape
    scales = q.scale_codes.repeat_interleave(q.cast.block[0], dim=0)[:N].cpu().numpy()
    codes = q.codes.cpu().numpy()
    if kind == "Q8_0":
        exponents = scales.astype(np.int32) - 133  # the element int8 counts steps of 2^-6
        is_empty = ~codes.reshape(N, -1, 32).any(-1)
        exponents = np.where(is_empty, 0, exponents)
        low, high = _FP16_EXPONENTS
        if exponents.min() < low or exponents.max() > high:
            return None
        d = np.ldexp(np.float32(1), exponents).astype("<f2")[..., None].view(np.uint8)
        blocks = np.concatenate((d, codes.reshape(N, -1, 32)), -1)
    elif kind == "MXFP4":
        blocks = np.concatenate((scales[..., None], _nibbles(codes, 32)), -1)
    else:
        groups = (_nibbles(codes, 16).reshape(N, -1, 32), scales.reshape(N, -1, 4))
        blocks = np.concatenate(groups[::-1], -1)
    scale = float(q.tensor_scale) if kind == "NVFP4" else None
    return StoredRows(kind, blocks.reshape(N, -1), (N, K), scale)


def values_of(rows: StoredRows) -> torch.Tensor:
    """The values of rows: float32, of their shape; the type is one of `READABLE`."""
    N, data = rows.shape[0], np.ascontiguousarray(rows.data)
    if dtype := PLAIN.get(rows.type):
        bits = np.int32 if rows.type == "F32" else np.int16
        return torch.from_numpy(data.view(bits).copy()).view(dtype).float().reshape(rows.shape)
    if unpack := _UNPACK.get(rows.type):
        found = unpack(data.reshape(N, -1, TYPES[rows.type][2]))
    else:
        library = package("gguf", f"a weight of GGUF's type {rows.type}", "gguf")
        with np.errstate(all="ignore"):  # the reader refuses what is not finite
            found = library.quants.dequantize(data.reshape(N, -1), library.GGMLQuantizationType[rows.type])
    values = torch.from_numpy(found).reshape(rows.shape)
    return values if rows.scale is None else values * rows.scale


def _nibbles(codes: Bytes, width: int) -> Bytes:
    """(N, K) codes of 4 bits -> (N, K / width, width / 2): the first half of a block low, the second high."""
    blocks = codes.reshape(len(codes), -1, width)
    return np.bitwise_or(blocks[..., : width // 2], blocks[..., width // 2 :] << 4, dtype=np.uint8)


def _halves(packed: Bytes) -> Bytes:
    return np.concatenate((packed & 15, packed >> 4), -1)


def _table(name: str) -> NDArray[np.float32]:
    fmt = format(name)
    return decode(torch.arange(2**fmt.bits, dtype=torch.uint8), fmt).numpy()


def _mxfp4(blocks: Bytes) -> NDArray[np.float32]:
    return _table("e2m1")[_halves(blocks[..., 1:])] * _table("e8m0")[blocks[..., :1]]


def _nvfp4(blocks: Bytes) -> NDArray[np.float32]:
    packed = blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8)
    return _table("e2m1")[_halves(packed)] * _table("e4m3")[blocks[..., :4]][..., None]


def _q8_0(blocks: Bytes) -> NDArray[np.float32]:
    d = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
    return np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.float32) * d


#: The types that are written: decoded here, where a scale that is not a number makes values that are none.
_UNPACK = {"MXFP4": _mxfp4, "NVFP4": _nvfp4, "Q8_0": _q8_0}
_NOT_DECODED = ("F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0")
#: The types that `values_of` reads, others than those above by the package of llama.cpp.
READABLE = tuple(kind for kind in TYPES if kind not in _NOT_DECODED)
