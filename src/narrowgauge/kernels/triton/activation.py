"""Activations in tiles: each input is read once, each output written once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels.amax import attach_amax, new_amax
from narrowgauge.kernels.triton.arithmetic import exp, magnitude, narrow, wide
from narrowgauge.kernels.triton.launch import cdiv, launch, next_power_of_2, tl, triton
from narrowgauge.system.second_derivative import FirstOrderFunction

#: Elements of a tile, 16 per thread in four warps: two 16-byte loads from bf16, for each operand.
TILE = 2048


@triton.jit
def tile_of(rows, F, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A tile of [rows, F]: its rows (int64), columns, and which are in bounds. Tiles run along the rows."""
    across = tl.cdiv(F, COLS)
    row = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = (tl.program_id(0) % across * COLS + tl.arange(0, COLS))[None, :]
    return row, col, (row < rows) & (col < F)


@triton.jit
def swiglu_forward(gate_up_ptr, out_ptr, amax_ptr, rows, F, ROWS: tl.constexpr, COLS: tl.constexpr):
    """silu(gate) * up."""
    row, col, inside = tile_of(rows, F, ROWS, COLS)
    at = row * 2 * F + col
    gate = wide(tl.load(gate_up_ptr + at, inside, 0))
    up = wide(tl.load(gate_up_ptr + at + F, inside, 0))
    silu = narrow(tl.math.div_rn(gate, 1 + exp(-gate)), out_ptr.dtype.element_ty)
    y = narrow(wide(silu) * up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * F + col, y, inside)
    tl.atomic_max(amax_ptr, tl.max(tl.max(magnitude(y), 1), 0), sem="relaxed")


@triton.jit
def swiglu_backward(dy_ptr, gate_up_ptr, out_ptr, amax_ptr, rows, F, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The gradients of gate and up, concatenated."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
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
    tl.store(out_ptr + at, dgate, inside)
    tl.store(out_ptr + at + F, dup, inside)
    largest = tl.maximum(magnitude(dgate), magnitude(dup))
    tl.atomic_max(amax_ptr, tl.max(tl.max(largest, 1), 0), sem="relaxed")


@triton.jit
def _turns(x):
    """1 + exp(-2u) of GELU's u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    u = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
    return 1 + exp(-2 * u)


@triton.jit
def gelu_forward(x_ptr, out_ptr, amax_ptr, count, BLOCK: tl.constexpr):
    """x * sigmoid(2u)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = wide(tl.load(x_ptr + at, inside, 0))
    y = narrow(tl.math.div_rn(x, _turns(x)), out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, y, inside)
    tl.atomic_max(amax_ptr, tl.max(magnitude(y), 0), sem="relaxed")


@triton.jit
def gelu_backward(dy_ptr, x_ptr, out_ptr, amax_ptr, count, BLOCK: tl.constexpr):
    """dy * (s + x s (1 - s) 2u'), s = sigmoid(2u)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    dy = wide(tl.load(dy_ptr + at, inside, 0))
    x = wide(tl.load(x_ptr + at, inside, 0))
    sigmoid = tl.math.div_rn(1.0, _turns(x))
    slope = 1.5957691216057308 * (1 + 0.134145 * (x * x))
    dx = narrow(dy * (sigmoid + x * sigmoid * (1 - sigmoid) * slope), out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, dx, inside)
    tl.atomic_max(amax_ptr, tl.max(magnitude(dx), 0), sem="relaxed")


class Activation(FirstOrderFunction):
    """`activation.swiglu` or `gelu`, and its gradient: `compute` gives y of x, and dx of x and dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Callable[..., Tensor]) -> Tensor:
        """The activation."""
        ctx.save_for_backward(x)
        ctx.compute = compute
        return compute(x.contiguous())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """The gradient of x."""
        (x,) = ctx.saved_tensors
        return ctx.compute(x.contiguous(), dy.contiguous()), None


def swiglu(gate_up: Tensor, dy: Tensor | None = None) -> Tensor:
    """[..., 2F] -> [..., F], or the gradient [..., 2F].

    A tile has up to 1024 columns, so that a wide row wastes little.
    """
    F = gate_up.shape[-1] // 2
    rows, cols = gate_up.numel() // (2 * F), min(1024, next_power_of_2(F))
    tile = {"ROWS": TILE // cols, "COLS": cols}
    tiles = cdiv(rows, tile["ROWS"]) * cdiv(F, cols)
    if dy is None:
        y = gate_up.new_empty(*gate_up.shape[:-1], F)
        return _launched(swiglu_forward, tiles, [gate_up], y, rows, F, **tile)
    # 16-byte loads per thread; with eight warps fp32 needs more registers than a B200 has.
    tile["num_warps"] = 16 if dy.element_size() == 4 else 8
    return _launched(swiglu_backward, tiles, [dy, gate_up], torch.empty_like(gate_up), rows, F, **tile)


def gelu(x: Tensor, dy: Tensor | None = None) -> Tensor:
    """The activation, or the gradient of x."""
    kernel, inputs = (gelu_forward, [x]) if dy is None else (gelu_backward, [dy, x])
    return _launched(kernel, cdiv(x.numel(), TILE), inputs, torch.empty_like(x), x.numel(), BLOCK=TILE)


def _launched(
    kernel: Any, tiles: int, inputs: Sequence[Tensor], out: Tensor, *numbers: int, **options: Any
) -> Tensor:
    """The output that a kernel writes from contiguous inputs, with its amax attached."""
    amax = new_amax(out.device)
    bits = amax.view(torch.int32)
    launch(kernel, (tiles,), *inputs, out, bits, *numbers, writes="out_ptr", updates="amax_ptr", **options)
    attach_amax(out, amax)
    return out
