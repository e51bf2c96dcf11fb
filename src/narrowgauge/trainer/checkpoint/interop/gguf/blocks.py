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

import numpy as np
import torch
from numpy.typing import NDArray

from narrowgauge.quantization import Cast, QTensor
from narrowgauge.quantization import cast as named_cast
from narrowgauge.recipes.cast_layout import layout_of
from narrowgauge.trainer.checkpoint.interop.gguf.container import StoredRows, block_of, library

Bytes = NDArray[np.uint8]
#: The type of each cast's codes, and the columns of a block.
_TYPE_OF = {"mxfp4": ("MXFP4", 32), "nvfp4": ("NVFP4", 16), "mxint8": ("Q8_0", 32)}
PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in PLAIN.items()}
_FP16_EXPONENTS = (-24, 15)  # powers of two that fp16 holds exactly
_NO_NUMBER = {"MXFP4": (1, 255), "NVFP4": (4, 127)}  # bytes of scales at the start of a block, and their NaN


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
            return kind if columns % block_of(kind)[0] == 0 else None
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
    """The values of rows, float32 of their shape; NaN in a 4-bit block whose scale is NaN."""
    data = np.ascontiguousarray(rows.data)
    if dtype := PLAIN.get(rows.type):
        bits = np.int32 if rows.type == "F32" else np.int16
        return torch.from_numpy(data.view(bits).copy()).view(dtype).float().reshape(rows.shape)
    gguf, (elements, size) = library(), block_of(rows.type)
    with np.errstate(all="ignore"):  # the reader refuses what is not finite
        lines = data.reshape(-1, rows.shape[-1] // elements * size)
        found = gguf.quants.dequantize(lines, gguf.GGMLQuantizationType[rows.type])
    if rows.type in _NO_NUMBER:  # which the package reads as one
        scales, code = _NO_NUMBER[rows.type]
        found.reshape(-1, elements)[(data.reshape(-1, size)[:, :scales] == code).any(1)] = np.nan
    values = torch.from_numpy(found).reshape(rows.shape)
    return values if rows.scale is None else values * rows.scale


def _nibbles(codes: Bytes, width: int) -> Bytes:
    """(N, K) codes of 4 bits -> (N, K / width, width / 2): the first half of a block low, the second high."""
    blocks = codes.reshape(len(codes), -1, width)
    return np.bitwise_or(blocks[..., : width // 2], blocks[..., width // 2 :] << 4, dtype=np.uint8)
