"""Heads in tiles: some tokens of one head, in two halves, so that a tile can also sum over its tokens."""

from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels.amax import attach_amax, new_amax
from narrowgauge.kernels.dispatch import in_rows
from narrowgauge.kernels.triton.arithmetic import magnitude, narrow, wide
from narrowgauge.kernels.triton.launch import cdiv, launch, next_power_of_2, tl, triton
from narrowgauge.system.second_derivative import FirstOrderFunction

#: Pairs of a tile, 16 per thread in four warps: two 16-byte loads from each half in bf16.
TILE = 2048
#: For a tile that is only rotated: 8 per thread.
ROTARY_TILE = 1024


@triton.jit
def _angles(table_ptr, b, t, pair, inside, table_b, table_t, sines):
    """Cosines and sines of the pairs of some tokens."""
    at = table_ptr + (b * table_b + t * table_t)[:, None] + pair
    return tl.load(at, inside, 0), tl.load(at + sines, inside, 0)


@triton.jit
def _turned(x1, x2, cos, sin):
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def _with_bias(x, bias_at, inside, dtype: tl.constexpr):
    """x + bias, both in `dtype` and the sum rounded to it; as fp32."""
    bias = wide(narrow(wide(tl.load(bias_at, inside, 0)), dtype))
    return wide(narrow(x + bias, dtype))


@triton.jit
def split_forward(
    x_ptr, bias_ptr, table_ptr, out_ptr, M, T, heads, turned, half, table_b, table_t, sines,
    ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Some tokens of one head: adds the bias, and rotates if it is one of the first `turned` heads."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    pair = tl.arange(0, HALF)[None, :]
    inside = (token < M)[:, None] & (pair < half)
    dtype = out_ptr.dtype.element_ty
    at = (token * heads + head)[:, None] * (2 * half) + pair
    x1 = wide(tl.load(x_ptr + at, inside, 0))
    x2 = wide(tl.load(x_ptr + at + half, inside, 0))
    if bias_ptr is not None:
        of_head = bias_ptr + head * (2 * half) + pair
        x1 = _with_bias(x1, of_head, pair < half, dtype)
        x2 = _with_bias(x2, of_head + half, pair < half, dtype)
    if table_ptr is not None:
        is_turned = head + tl.zeros((1, 1), tl.int32) < turned
        cos, sin = _angles(
            table_ptr, token // T, token % T, pair, inside & is_turned, table_b, table_t, sines
        )
        y1, y2 = _turned(x1, x2, cos, sin)
        x1, x2 = tl.where(is_turned, y1, x1), tl.where(is_turned, y2, x2)
    tl.store(out_ptr + at, narrow(x1, dtype), inside)
    tl.store(out_ptr + at + half, narrow(x2, dtype), inside)


@triton.jit
def _load_halves(x_ptr, b, n, t, pair, half, xb, xn, xt, inside):
    at = x_ptr + (b * xb + n * xn + t * xt)[:, None] + pair
    return wide(tl.load(at, inside, 0)), wide(tl.load(at + half, inside, 0))


@triton.jit
def split_backward(
    dq_ptr, dk_ptr, dv_ptr, table_ptr, dx_ptr, dbias_ptr, amax_ptr, M, T, N, K, half,
    qb, qn, qt, kb, kn, kt, vb, vn, vt, table_b, table_t, sines,
    ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Some tokens of one head: the gradient rotated back, its sum over these tokens, its amax."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    b, t = token // T, token % T
    pair = tl.arange(0, HALF)[None, :]
    inside = (token < M)[:, None] & (pair < half)
    tile_head = head + tl.zeros((1, 1), tl.int32)
    is_q, is_turned = tile_head < N, tile_head < N + K
    is_k = is_turned & (tile_head >= N)
    q1, q2 = _load_halves(dq_ptr, b, head, t, pair, half, qb, qn, qt, inside & is_q)
    k1, k2 = _load_halves(dk_ptr, b, head - N, t, pair, half, kb, kn, kt, inside & is_k)
    v1, v2 = _load_halves(dv_ptr, b, head - N - K, t, pair, half, vb, vn, vt, inside & (tile_head >= N + K))
    x1 = tl.where(is_q, q1, tl.where(is_k, k1, v1))
    x2 = tl.where(is_q, q2, tl.where(is_k, k2, v2))
    if table_ptr is not None:
        cos, sin = _angles(table_ptr, b, t, pair, inside & is_turned, table_b, table_t, sines)
        y1, y2 = _turned(x1, x2, cos, -sin)
        x1, x2 = tl.where(is_turned, y1, x1), tl.where(is_turned, y2, x2)
    dtype = dx_ptr.dtype.element_ty
    x1, x2 = narrow(x1, dtype), narrow(x2, dtype)
    heads = N + 2 * K
    at = (token * heads + head)[:, None] * (2 * half) + pair
    tl.store(dx_ptr + at, x1, inside)
    tl.store(dx_ptr + at + half, x2, inside)
    if dbias_ptr is not None:
        column = tl.arange(0, HALF)
        to = dbias_ptr + (tl.program_id(0).to(tl.int64) * heads + head) * (2 * half) + column
        tl.store(to, tl.sum(wide(x1), 0), column < half)
        tl.store(to + half, tl.sum(wide(x2), 0), column < half)
    largest = tl.maximum(magnitude(x1), magnitude(x2))
    tl.atomic_max(amax_ptr, tl.max(tl.max(largest, 1), 0), sem="relaxed")


def _tiles(tokens: int, head_dim: int) -> tuple[int, dict[str, Any]]:
    """The number of tiles for the tokens of a head, and their shape."""
    half = next_power_of_2(head_dim // 2)
    rows = max(1, TILE // half)
    return cdiv(tokens, rows), {"ROWS": rows, "HALF": half}


def _strides(table: Tensor | None) -> tuple[int, int, int]:
    """The table's strides of sequences and tokens, and the distance from cosines to sines."""
    if table is None:
        return 0, 0, 0
    return table.stride(1) if table.ndim == 5 else 0, table.stride(-2), table.stride(0)


class SplitHeads(FirstOrderFunction):
    """`heads.split_heads` -> (q, k, v), views of one tensor in the order of qkv."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv_BTC: Tensor,
        bias_C: Tensor | None,
        table: Tensor | None,
        heads_NKK: tuple[int, ...],
        head_dim: int,
    ) -> tuple[Tensor, ...]:
        """One tensor, read and written once."""
        ctx.save_for_backward(table)
        ctx.bias_dtype = None if bias_C is None else bias_C.dtype
        bias_C = None if bias_C is None else bias_C.contiguous()
        table = None if table is None else in_rows(table)
        qkv_BTC = qkv_BTC.contiguous()
        B, T, _ = qkv_BTC.shape
        out_BTC = torch.empty_like(qkv_BTC)
        tiles, tile = _tiles(B * T, head_dim)
        N, K, _ = heads_NKK
        launch(
            split_forward, (tiles, sum(heads_NKK)), qkv_BTC, bias_C, table, out_BTC,
            B * T, T, sum(heads_NKK), N + K, head_dim // 2, *_strides(table),
            writes="out_ptr", **tile,
        )  # fmt: skip
        heads_BTNH = out_BTC.unflatten(-1, (-1, head_dim)).split(list(heads_NKK), dim=2)
        return tuple(h.transpose(1, 2) for h in heads_BTNH)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of qkv, and that of the bias from partial sums."""
        (table,) = ctx.saved_tensors
        has_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[1]
        table = None if table is None else in_rows(table)
        dq_BNTH, dk_BKTH, dv_BKTH = (in_rows(x) for x in (dq, dk, dv))
        B, N, T, H = dq_BNTH.shape
        K = dk_BKTH.shape[1]
        heads = N + 2 * K
        dqkv_BTC = torch.empty(B, T, heads * H, dtype=dq_BNTH.dtype, device=dq_BNTH.device)
        tiles, tile = _tiles(B * T, H)
        amax = new_amax(dq_BNTH.device)
        sums_PC = dqkv_BTC.new_empty(tiles, heads * H, dtype=torch.float32) if has_bias else None
        launch(
            split_backward, (tiles, heads), dq_BNTH, dk_BKTH, dv_BKTH, table, dqkv_BTC, sums_PC,
            amax.view(torch.int32), B * T, T, N, K, H // 2,
            *dq_BNTH.stride()[:3], *dk_BKTH.stride()[:3], *dv_BKTH.stride()[:3], *_strides(table),
            writes="dx_ptr dbias_ptr", updates="amax_ptr", **tile,
        )  # fmt: skip
        attach_amax(dqkv_BTC, amax)
        dbias = None if sums_PC is None else sums_PC.sum(0).to(ctx.bias_dtype)
        return dqkv_BTC, dbias, None, None, None


@triton.jit
def rotary_pairs(
    x_ptr, table_ptr, y_ptr, rows, N, T, half, xb, xn, xt, yb, yn, yt, table_b, table_t, sines,
    IS_BACK: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate [B, N, T, H] by its angles, or back.

    Neighboring heads share their token's angles, which come from the cache. `xb` and so on are strides; the
    sines begin at `sines` in the table.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, t, n = row // N // T, row // N % T, row % N
    pair = tl.arange(0, HALF)[None, :]
    inside = (row < rows)[:, None] & (pair < half)
    x1, x2 = _load_halves(x_ptr, b, n, t, pair, half, xb, xn, xt, inside)
    cos, sin = _angles(table_ptr, b, t, pair, inside, table_b, table_t, sines)
    y1, y2 = _turned(x1, x2, cos, -sin if IS_BACK else sin)
    to_y = y_ptr + (b * yb + t * yt + n * yn)[:, None] + pair
    tl.store(to_y, narrow(y1, y_ptr.dtype.element_ty), inside)
    tl.store(to_y + half, narrow(y2, y_ptr.dtype.element_ty), inside)


def rotated(x_BNTH: Tensor, table: Tensor, is_back: bool) -> Tensor:
    """The rotated heads, in the dtype of `x_BNTH` and its order of axes in memory; `table` is fp32."""
    x_BNTH, table = in_rows(x_BNTH), in_rows(table)
    B, N, T, H = x_BNTH.shape
    y_BNTH = torch.empty_like(x_BNTH)
    half_block = next_power_of_2(H // 2)
    rows_each = max(1, ROTARY_TILE // half_block)
    launch(
        rotary_pairs, (cdiv(B * N * T, rows_each),), x_BNTH, table, y_BNTH, B * N * T, N, T, H // 2,
        *x_BNTH.stride()[:3], *y_BNTH.stride()[:3], *_strides(table),
        writes="y_ptr", IS_BACK=is_back, ROWS=rows_each, HALF=half_block,
    )  # fmt: skip
    return y_BNTH
