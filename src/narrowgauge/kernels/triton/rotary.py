"""Rotary positions by tiles of heads: the two halves of some heads, and the angles of their tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels.triton.arithmetic import narrow, wide
from narrowgauge.kernels.triton.launch import launch

#: Pairs of a tile, 8 a thread in four warps: a load of 16 bytes from each half in bf16.
TILE = 1024


@triton.jit
def rotary_pairs(
    x_ptr,
    table_ptr,
    y_ptr,
    rows,
    N,
    T,
    half,
    xb,
    xn,
    xt,
    yb,
    yn,
    yt,
    table_b,
    table_t,
    sines,
    IS_BACK: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Turn [B, N, T, H] by its angles, or back.

    Heads next to each other share their token's angles, which come from the cache. `xb` and so on are
    strides; the sines begin at `sines` in the table.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, t, n = row // N // T, row // N % T, row % N
    pair = tl.arange(0, HALF)[None, :]
    inside = (row < rows)[:, None] & (pair < half)
    from_x = x_ptr + (b * xb + t * xt + n * xn)[:, None] + pair
    from_table = table_ptr + (b * table_b + t * table_t)[:, None] + pair
    to_y = y_ptr + (b * yb + t * yt + n * yn)[:, None] + pair
    x1 = wide(tl.load(from_x, inside, 0))
    x2 = wide(tl.load(from_x + half, inside, 0))
    cos = tl.load(from_table, inside, 0)
    sin = tl.load(from_table + sines, inside, 0)
    if IS_BACK:
        sin = -sin
    dtype = y_ptr.dtype.element_ty
    tl.store(to_y, narrow(x1 * cos - x2 * sin, dtype), inside)
    tl.store(to_y + half, narrow(x2 * cos + x1 * sin, dtype), inside)


def launch_rotary(x_BNTH: Tensor, table: Tensor, is_back: bool) -> Tensor:
    """The turned heads, in the dtype of `x_BNTH` and its order of axes in memory.

    The last axes of `x_BNTH` and of the fp32 `table` have to be contiguous.
    """
    B, N, T, H = x_BNTH.shape
    y_BNTH = torch.empty_like(x_BNTH)
    half_block = triton.next_power_of_2(H // 2)
    rows_each = max(1, TILE // half_block)
    launch(
        rotary_pairs,
        (triton.cdiv(B * N * T, rows_each),),
        x_BNTH,
        table,
        y_BNTH,
        B * N * T,
        N,
        T,
        H // 2,
        *x_BNTH.stride()[:3],
        *y_BNTH.stride()[:3],
        table.stride(1) if table.ndim == 5 else 0,
        table.stride(-2),
        table.stride(0),
        writes="y_ptr",
        IS_BACK=is_back,
        ROWS=rows_each,
        HALF=half_block,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y_BNTH
