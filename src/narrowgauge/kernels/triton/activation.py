"""Activations in tiles: each input is read once, each output written once."""

from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels.amax import new_amax
from narrowgauge.kernels.triton.arithmetic import exp, magnitude, narrow, wide
from narrowgauge.kernels.triton.launch import cdiv, launch, next_power_of_2, tl, triton

#: Elements of a tile, 16 per thread in four warps: two 16-byte loads from bf16, for each operand.
TILE = 2048

FOUR_WARPS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
EIGHT_WARPS: dict[str, Any] = FOUR_WARPS | {"num_warps": 8}
SIXTEEN_WARPS: dict[str, Any] = FOUR_WARPS | {"num_warps": 16}


@triton.jit
def tile_of(rows, F, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A tile of [rows, F]: its rows (int64), columns, and which are in bounds. Tiles run along the rows."""
    across = tl.cdiv(F, COLS)
    row = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = (tl.program_id(0) % across * COLS + tl.arange(0, COLS))[None, :]
    return row, col, (row < rows) & (col < F)


@triton.jit
def swiglu_forward(gate_up_ptr, y_ptr, amax_ptr, rows, F, ROWS: tl.constexpr, COLS: tl.constexpr):
    """silu(gate) * up."""
    row, col, inside = tile_of(rows, F, ROWS, COLS)
    at = row * 2 * F + col
    gate = wide(tl.load(gate_up_ptr + at, inside, 0))
    up = wide(tl.load(gate_up_ptr + at + F, inside, 0))
    silu = narrow(tl.math.div_rn(gate, 1 + exp(-gate)), y_ptr.dtype.element_ty)
    y = narrow(wide(silu) * up, y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * F + col, y, inside)
    tl.atomic_max(amax_ptr, tl.max(tl.max(magnitude(y), 1), 0), sem="relaxed")


@triton.jit
def swiglu_backward(dy_ptr, gate_up_ptr, grad_ptr, amax_ptr, rows, F, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The gradients of gate and up, concatenated."""
    dtype: tl.constexpr = grad_ptr.dtype.element_ty
    row, col, inside = tile_of(rows, F, ROWS, COLS)
    at = row * 2 * F + col
    dy = wide(tl.load(dy_ptr + row * F + col, inside, 0))
    gate = wide(tl.load(gate_up_ptr + at, inside, 0))
    up = wide(tl.load(gate_up_ptr + at + F, inside, 0))
    below = 1 + exp(-gate)
    silu = wide(narrow(tl.math.div_rn(gate, below), dtype))
    sigmoid = tl.math.div_rn(1.0, below)
    dsilu = wide(narrow(dy * up, dtype))
    dgate = narrow(dsilu * sigmoid * (1 + gate * (1 - sigmoid)), dtype)
    dup = narrow(dy * silu, dtype)
    tl.store(grad_ptr + at, dgate, inside)
    tl.store(grad_ptr + at + F, dup, inside)
    largest = tl.maximum(magnitude(dgate), magnitude(dup))
    tl.atomic_max(amax_ptr, tl.max(tl.max(largest, 1), 0), sem="relaxed")


@triton.jit
def _turns(x):
    """1 + exp(-2u) of GELU's u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    u = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
    return 1 + exp(-2 * u)


@triton.jit
def gelu_forward(x_ptr, y_ptr, amax_ptr, count, BLOCK: tl.constexpr):
    """x * sigmoid(2u)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = wide(tl.load(x_ptr + at, inside, 0))
    y = narrow(tl.math.div_rn(x, _turns(x)), y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, inside)
    tl.atomic_max(amax_ptr, tl.max(magnitude(y), 0), sem="relaxed")


@triton.jit
def gelu_backward(dy_ptr, x_ptr, dx_ptr, amax_ptr, count, BLOCK: tl.constexpr):
    """dy * (s + x s (1 - s) 2u'), s = sigmoid(2u)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    dy = wide(tl.load(dy_ptr + at, inside, 0))
    x = wide(tl.load(x_ptr + at, inside, 0))
    sigmoid = tl.math.div_rn(1.0, _turns(x))
    slope = 1.5957691216057308 * (1 + 0.134145 * (x * x))
    dx = narrow(dy * (sigmoid + x * sigmoid * (1 - sigmoid) * slope), dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + at, dx, inside)
    tl.atomic_max(amax_ptr, tl.max(magnitude(dx), 0), sem="relaxed")


def tiling(rows: int, F: int) -> tuple[int, dict[str, Any]]:
    """The number of tiles and their shape: up to 1024 columns, so that a wide row wastes little."""
    cols = min(1024, next_power_of_2(F))
    tile = {"ROWS": TILE // cols, "COLS": cols}
    return cdiv(rows, tile["ROWS"]) * cdiv(F, cols), tile


def launch_swiglu(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 2F] contiguous -> [..., F], and its amax (0-dim fp32)."""
    F = gate_up.shape[-1] // 2
    y = torch.empty(*gate_up.shape[:-1], F, dtype=gate_up.dtype, device=gate_up.device)
    rows = y.numel() // F
    tiles, tile = tiling(rows, F)
    amax = new_amax(y.device)
    bits = amax.view(torch.int32)
    launch(
        swiglu_forward, (tiles,), gate_up, y, bits, rows, F,
        writes="y_ptr", updates="amax_ptr", **tile, **FOUR_WARPS,
    )  # fmt: skip
    return y, amax


def launch_swiglu_backward(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """[..., F] and [..., 2F], both contiguous -> the gradient [..., 2F], and its amax."""
    F = dy.shape[-1]
    grad = torch.empty_like(gate_up)
    rows = dy.numel() // F
    tiles, tile = tiling(rows, F)
    amax = new_amax(dy.device)
    bits = amax.view(torch.int32)
    # 16-byte loads per thread; with eight warps fp32 needs more registers than a B200 has.
    warps = SIXTEEN_WARPS if dy.element_size() == 4 else EIGHT_WARPS
    launch(
        swiglu_backward, (tiles,), dy, gate_up, grad, bits, rows, F,
        writes="grad_ptr", updates="amax_ptr", **tile, **warps,
    )  # fmt: skip
    return grad, amax


def launch_gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous -> the same shape, and its amax (0-dim fp32)."""
    y = torch.empty_like(x)
    tiles = cdiv(x.numel(), TILE)
    amax = new_amax(x.device)
    bits = amax.view(torch.int32)
    launch(
        gelu_forward, (tiles,), x, y, bits, x.numel(),
        writes="y_ptr", updates="amax_ptr", BLOCK=TILE, **FOUR_WARPS,
    )  # fmt: skip
    return y, amax


def launch_gelu_backward(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both contiguous -> the gradient of x, and its amax."""
    dx = torch.empty_like(x)
    tiles = cdiv(x.numel(), TILE)
    amax = new_amax(x.device)
    bits = amax.view(torch.int32)
    launch(
        gelu_backward, (tiles,), dy, x, dx, bits, x.numel(),
        writes="dx_ptr", updates="amax_ptr", BLOCK=TILE, **FOUR_WARPS,
    )  # fmt: skip
    return dx, amax
