"""What stands around a product: scale and rounding of an emulated one, codes for a native one.

A native product reads both operands along the contraction. Codes that lie along the other axis are copied by
square tiles, 64 bytes next to each other in both directions: one byte read and one written an element.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels.triton.arithmetic import narrow
from narrowgauge.kernels.triton.launch import launch

#: Elements of a tile, 16 a thread: four loads of 16 bytes from fp32.
TILE = 2048
SIDE = 64


@triton.jit
def scale_and_round(product_ptr, scale_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """product * scale."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    scaled = tl.load(product_ptr + at, inside, 0) * tl.load(scale_ptr)
    tl.store(out_ptr + at, narrow(scaled, out_ptr.dtype.element_ty), inside)


def launch_scaled(product: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """product * scale in `dtype`, in the shape of `product`, which is contiguous."""
    out = torch.empty_like(product, dtype=dtype)
    launch(
        scale_and_round,
        (triton.cdiv(product.numel(), TILE),),
        product,
        scale,
        out,
        product.numel(),
        writes="out_ptr",
        BLOCK=TILE,
        num_warps=4,
        enable_fp_fusion=False,
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
    """A contiguous matrix of bytes with its axes exchanged, contiguous."""
    rows, columns = x_RC.shape
    out_CR = x_RC.new_empty(columns, rows)
    tiles = triton.cdiv(rows, SIDE) * triton.cdiv(columns, SIDE)
    launch(
        transpose,
        (tiles,),
        x_RC,
        out_CR,
        rows,
        columns,
        writes="out_ptr",
        SIDE=SIDE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out_CR
