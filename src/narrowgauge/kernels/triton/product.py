"""What surrounds a GEMM: scales and rounding after an emulated one, codes for a native one.

A native GEMM reads both operands along the contraction. Codes laid out along the other axis are transposed in
square tiles, 64 contiguous bytes in both directions: one byte read and one written per element.
"""

import torch
from torch import Tensor

from narrowgauge.kernels.triton.arithmetic import narrow
from narrowgauge.kernels.triton.launch import cdiv, launch, next_power_of_2, tl, triton

#: Elements of a tile, 16 per thread: four 16-byte loads from fp32.
TILE = 2048
SIDE = 64


@triton.jit
def scale_and_round(
    product_ptr, scale_ptr, other_ptr, out_ptr, count, HAS_OTHER: tl.constexpr, BLOCK: tl.constexpr
):
    """product * (scale * other)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    scale = tl.load(scale_ptr)
    if HAS_OTHER:
        scale = scale * tl.load(other_ptr)
    scaled = tl.load(product_ptr + at, inside, 0) * scale
    tl.store(out_ptr + at, narrow(scaled, out_ptr.dtype.element_ty), inside)


def launch_scaled(product: Tensor, scale: Tensor, dtype: torch.dtype, other: Tensor | None = None) -> Tensor:
    """product * (scale * other) in `dtype`, in the shape of `product`, which is contiguous."""
    out = torch.empty_like(product, dtype=dtype)
    launch(
        scale_and_round,
        (cdiv(product.numel(), TILE),),
        product,
        scale,
        scale if other is None else other,
        out,
        product.numel(),
        writes="out_ptr",
        HAS_OTHER=other is not None,
        BLOCK=TILE,
    )
    return out


@triton.jit
def scale_rows_and_round(
    product_ptr, rest_ptr, row_ptr, column_ptr, out_ptr, N, row_stride, column_stride,
    HAS_REST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(product * row + rest) * column."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = row * N + n, n < N
    value = tl.load(product_ptr + at, inside, 0) * tl.load(row_ptr + row * row_stride)
    if HAS_REST:
        value += tl.load(rest_ptr + at, inside, 0)
    value = value * tl.load(column_ptr + n * column_stride, inside, 0)
    tl.store(out_ptr + at, narrow(value, out_ptr.dtype.element_ty), inside)


def launch_scaled_rows(
    product: Tensor, rest: Tensor | None, rows: Tensor, columns: Tensor, dtype: torch.dtype
) -> Tensor:
    """(product * rows + rest) * columns in `dtype`; both are contiguous (M, N), scales 1-dim or 0-dim."""
    out = torch.empty_like(product, dtype=dtype)
    M, N = product.shape
    block = min(TILE // 2, next_power_of_2(N))
    launch(
        scale_rows_and_round,
        (M, cdiv(N, block)),
        product,
        product if rest is None else rest,
        rows,
        columns,
        out,
        N,
        rows.stride(0) if rows.ndim else 0,
        columns.stride(0) if columns.ndim else 0,
        writes="out_ptr",
        HAS_REST=rest is not None,
        BLOCK=block,
    )
    return out


@triton.jit
def transpose(x_ptr, out_ptr, rows, columns, SIDE: tl.constexpr):
    """out[column, row] = x[row, column], both contiguous."""
    across = tl.cdiv(columns, SIDE)
    row = (tl.program_id(0) // across * SIDE + tl.arange(0, SIDE)).to(tl.int64)[:, None]
    column = (tl.program_id(0) % across * SIDE + tl.arange(0, SIDE)).to(tl.int64)[None, :]
    inside = (row < rows) & (column < columns)
    tl.store(out_ptr + column * rows + row, tl.load(x_ptr + row * columns + column, inside, 0), inside)


def launch_transposed(x_RC: Tensor) -> Tensor:
    """Transpose a contiguous matrix of bytes; the result is contiguous."""
    rows, columns = x_RC.shape
    out_CR = x_RC.new_empty(columns, rows)
    tiles = cdiv(rows, SIDE) * cdiv(columns, SIDE)
    launch(
        transpose,
        (tiles,),
        x_RC,
        out_CR,
        rows,
        columns,
        writes="out_ptr",
        SIDE=SIDE,
    )
    return out_CR
