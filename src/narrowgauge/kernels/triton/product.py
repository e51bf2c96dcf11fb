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
    product_ptr, row_ptr, other_ptr, rest_ptr, column_ptr, out_ptr, N, row_stride, column_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(product * (row * other) + rest) * column, for rows of N elements."""
    program, across = tl.program_id(0).to(tl.int64), tl.cdiv(N, BLOCK)
    row, n = program // across, program % across * BLOCK + tl.arange(0, BLOCK)
    at, inside = row * N + n, n < N
    scale = tl.load(row_ptr + row * row_stride)
    if other_ptr is not None:
        scale = scale * tl.load(other_ptr)
    value = tl.load(product_ptr + at, inside, 0) * scale
    if rest_ptr is not None:
        value += tl.load(rest_ptr + at, inside, 0)
    if column_ptr is not None:
        value = value * tl.load(column_ptr + n * column_stride, inside, 0)
    tl.store(out_ptr + at, narrow(value, out_ptr.dtype.element_ty), inside)


def launch_scaled(
    product: Tensor,
    rows: Tensor,
    dtype: torch.dtype,
    other: Tensor | None,
    rest: Tensor | None,
    columns: Tensor | None,
) -> Tensor:
    """`scaled_and_rounded` of contiguous tensors."""
    out = torch.empty_like(product, dtype=dtype)
    N = product.numel() if rows.ndim == 0 and columns is None else product.shape[-1]
    block = min(TILE, next_power_of_2(N))
    row_stride, column_stride = (x.stride(0) if x is not None and x.ndim else 0 for x in (rows, columns))
    launch(
        scale_and_round, (product.numel() // N * cdiv(N, block),),
        product, rows, other, rest, columns, out, N, row_stride, column_stride,
        writes="out_ptr", BLOCK=block,
    )  # fmt: skip
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
    launch(transpose, (tiles,), x_RC, out_CR, rows, columns, writes="out_ptr", SIDE=SIDE)
    return out_CR
