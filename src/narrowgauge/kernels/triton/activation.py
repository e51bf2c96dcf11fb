"""Activations by tiles: each input is read once, each output written once."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.formats import Format
from narrowgauge.kernels.amax_cache import new_amax
from narrowgauge.kernels.triton.arithmetic import exp, magnitude, narrow, wide
from narrowgauge.kernels.triton.launch import launch
from narrowgauge.kernels.triton.rounding import code_of, to_grid
from narrowgauge.kernels.triton.scales import INFINITE, fp32_scale

#: Elements of a tile, 16 a thread in four warps: two loads of 16 bytes from bf16, for each operand.
TILE = 2048

#: Rows and columns of a tile that is written along both axes: 64 bytes of codes next to each other in each.
SQUARE: dict[str, Any] = {"ROWS": 64, "COLS": 64}

FOUR_WARPS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
EIGHT_WARPS: dict[str, Any] = FOUR_WARPS | {"num_warps": 8}
SIXTEEN_WARPS: dict[str, Any] = FOUR_WARPS | {"num_warps": 16}


@triton.jit
def tile_of(rows, F, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A tile of [rows, F]: its rows (int64) and columns, and which of them exist. Tiles go along the rows."""
    across = tl.cdiv(F, COLS)
    row = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = (tl.program_id(0) % across * COLS + tl.arange(0, COLS))[None, :]
    return row, col, (row < rows) & (col < F)


@triton.jit
def swiglu_forward(gate_up_ptr, y_ptr, amax_ptr, rows, F, ROWS: tl.constexpr, COLS: tl.constexpr):
    """silu(gate) * up; 0 beyond the edges."""
    row, col, inside = tile_of(rows, F, ROWS, COLS)
    at = row * 2 * F + col
    gate = wide(tl.load(gate_up_ptr + at, inside, 0))
    up = wide(tl.load(gate_up_ptr + at + F, inside, 0))
    silu = narrow(tl.math.div_rn(gate, 1 + exp(-gate)), y_ptr.dtype.element_ty)
    y = narrow(wide(silu) * up, y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * F + col, y, inside)
    tl.atomic_max(amax_ptr, tl.max(tl.max(magnitude(y), 1), 0), sem="relaxed")


@triton.jit
def _swiglu_gradients(dy, gate, up, dtype: tl.constexpr):
    """The gradients of gate and up, and silu(gate) * up, in `dtype`; of fp32 numbers."""
    below = 1 + exp(-gate)
    silu = wide(narrow(tl.math.div_rn(gate, below), dtype))
    sigmoid = tl.math.div_rn(1.0, below)
    dsilu = wide(narrow(dy * up, dtype))
    dgate = narrow(dsilu * sigmoid * (1 + gate * (1 - sigmoid)), dtype)
    return dgate, narrow(dy * silu, dtype), narrow(silu * up, dtype)


@triton.jit
def swiglu_backward(dy_ptr, gate_up_ptr, grad_ptr, amax_ptr, rows, F, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The gradients of gate and up, side by side; without `grad_ptr` their largest magnitude alone."""
    row, col, inside = tile_of(rows, F, ROWS, COLS)
    at = row * 2 * F + col
    dy = wide(tl.load(dy_ptr + row * F + col, inside, 0))
    gate = wide(tl.load(gate_up_ptr + at, inside, 0))
    up = wide(tl.load(gate_up_ptr + at + F, inside, 0))
    dgate, dup, _ = _swiglu_gradients(dy, gate, up, gate_up_ptr.dtype.element_ty)
    if grad_ptr is not None:
        tl.store(grad_ptr + at, dgate, inside)
        tl.store(grad_ptr + at + F, dup, inside)
    largest = tl.maximum(magnitude(dgate), magnitude(dup))
    tl.atomic_max(amax_ptr, tl.max(tl.max(largest, 1), 0), sem="relaxed")


@triton.jit
def _scale_of(amax_ptr, MAX: tl.constexpr):
    """(factor, scale) of a tensor from its largest magnitude, [1]; the scale is NaN if that is not finite."""
    amax = tl.load(amax_ptr + tl.arange(0, 1))
    finite = (amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITE
    factor, scale = fp32_scale(tl.where(finite, amax, 0.0), MAX, False)
    return factor, tl.where(finite, scale, float("nan"))


@triton.jit
def _codes(x, factor, scale, MAX: tl.constexpr, EMIN: tl.constexpr, M: tl.constexpr, ZERO: tl.constexpr):
    """FP8 codes of numbers under a scale, rounded to nearest even; those of zeros under a scale of NaN."""
    x = tl.where((scale == scale)[:, None], wide(x), 0.0) * factor[:, None]
    k, e, sign = to_grid(x, 0.0, MAX, EMIN, M, "nearest-even", 24)
    return code_of(k, e, sign, EMIN, M, 8, False, ZERO)


@triton.jit
def _store_both(x, out_ptr, other_ptr, row, col, inside, rows, columns):
    """A tile along its rows, and along its columns."""
    tl.store(out_ptr + row * columns + col, x, inside)
    tl.store(other_ptr + col.to(tl.int64) * rows + row, x, inside)


@triton.jit
def swiglu_backward_codes(
    dy_ptr, gate_up_ptr, grad_amax_ptr, y_amax_ptr, grad_ptr, grad_other_ptr, y_other_ptr,
    grad_scale_ptr, y_scale_ptr, rows, F, ROWS: tl.constexpr, COLS: tl.constexpr,
    MAX: tl.constexpr, EMIN: tl.constexpr, M: tl.constexpr, ZERO: tl.constexpr,
    Y_MAX: tl.constexpr, Y_EMIN: tl.constexpr, Y_M: tl.constexpr, Y_ZERO: tl.constexpr,
):  # fmt: skip
    """FP8 codes of the gradients of gate and up, side by side, along both axes; of y along its columns."""
    row, col, inside = tile_of(rows, F, ROWS, COLS)
    at = row * 2 * F + col
    dy = wide(tl.load(dy_ptr + row * F + col, inside, 0))
    gate = wide(tl.load(gate_up_ptr + at, inside, 0))
    up = wide(tl.load(gate_up_ptr + at + F, inside, 0))
    dgate, dup, y = _swiglu_gradients(dy, gate, up, gate_up_ptr.dtype.element_ty)
    factor, scale = _scale_of(grad_amax_ptr, MAX)
    y_factor, y_scale = _scale_of(y_amax_ptr, Y_MAX)
    is_first = tl.program_id(0) == 0
    tl.store(grad_scale_ptr + tl.arange(0, 1), scale, is_first)
    tl.store(y_scale_ptr + tl.arange(0, 1), y_scale, is_first)
    code = _codes(dgate, factor, scale, MAX, EMIN, M, ZERO)
    _store_both(code, grad_ptr, grad_other_ptr, row, col, inside, rows, 2 * F)
    code = _codes(dup, factor, scale, MAX, EMIN, M, ZERO)
    _store_both(code, grad_ptr, grad_other_ptr, row, col + F, inside, rows, 2 * F)
    code = _codes(y, y_factor, y_scale, Y_MAX, Y_EMIN, Y_M, Y_ZERO)
    tl.store(y_other_ptr + col.to(tl.int64) * rows + row, code, inside)


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


def _tiles(rows: int, F: int) -> tuple[int, dict[str, Any]]:
    """How many tiles, and their shape: up to 1024 columns, so that a wide row wastes little at its end."""
    cols = min(1024, triton.next_power_of_2(F))
    tile = {"ROWS": TILE // cols, "COLS": cols}
    return triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(F, cols), tile


def launch_swiglu(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 2F] contiguous -> [..., F], and its largest magnitude (0-dim fp32)."""
    F = gate_up.shape[-1] // 2
    y = torch.empty(*gate_up.shape[:-1], F, dtype=gate_up.dtype, device=gate_up.device)
    rows = y.numel() // F
    tiles, tile = _tiles(rows, F)
    amax = new_amax(y.device)
    bits = amax.view(torch.int32)
    launch(
        swiglu_forward, (tiles,), gate_up, y, bits, rows, F,
        writes="y_ptr", updates="amax_ptr", **tile, **FOUR_WARPS,
    )  # fmt: skip
    return y, amax


def launch_swiglu_backward(
    dy: Tensor, gate_up: Tensor, writes_gradient: bool = True
) -> tuple[Tensor | None, Tensor]:
    """[..., F] and [..., 2F], both contiguous -> the gradient [..., 2F] or None, its largest magnitude."""
    F = dy.shape[-1]
    grad = torch.empty_like(gate_up) if writes_gradient else None
    rows = dy.numel() // F
    tiles, tile = _tiles(rows, F)
    amax = new_amax(dy.device)
    bits = amax.view(torch.int32)
    # Loads of 16 bytes a thread; with eight warps fp32 takes more registers than a B200 leaves it.
    warps = SIXTEEN_WARPS if dy.element_size() == 4 else EIGHT_WARPS
    launch(
        swiglu_backward, (tiles,), dy, gate_up, grad, bits, rows, F,
        writes="grad_ptr", updates="amax_ptr", **tile, **warps,
    )  # fmt: skip
    return grad, amax


class SwigluCodes(NamedTuple):
    """FP8 codes (uint8), scales (0-dim fp32) of M rows of SwiGLU's gradient [M, 2F] and result y [M, F]."""

    grad_M2F: Tensor
    grad_2FM: Tensor
    grad_scale: Tensor
    y_FM: Tensor
    y_scale: Tensor


def launch_swiglu_backward_codes(
    dy_MF: Tensor, gate_up_M2F: Tensor, grad_amax: Tensor, y_amax: Tensor, grad: Format, y: Format
) -> SwigluCodes:
    """The gradient and y in the formats `grad` and `y`, from their largest magnitudes (0-dim fp32)."""
    rows, F = dy_MF.shape
    grad_M2F, grad_2FM, y_FM = (
        torch.empty(shape, dtype=torch.uint8, device=dy_MF.device)
        for shape in ((rows, 2 * F), (2 * F, rows), (F, rows))
    )
    grad_scale, y_scale = (torch.empty((), dtype=torch.float32, device=dy_MF.device) for _ in range(2))
    tiles = triton.cdiv(rows, SQUARE["ROWS"]) * triton.cdiv(F, SQUARE["COLS"])
    launch(
        swiglu_backward_codes, (tiles,),
        dy_MF, gate_up_M2F, grad_amax, y_amax, grad_M2F, grad_2FM, y_FM, grad_scale, y_scale, rows, F,
        writes="grad_ptr grad_other_ptr y_other_ptr grad_scale_ptr y_scale_ptr",
        **SQUARE, **_facts(grad, ""), **_facts(y, "Y_"), **SIXTEEN_WARPS,
    )  # fmt: skip
    return SwigluCodes(grad_M2F, grad_2FM, grad_scale, y_FM, y_scale)


def _facts(fmt: Format, of: str) -> dict[str, Any]:
    """An FP8 format as a kernel's constants."""
    return {
        f"{of}MAX": fmt.max,
        f"{of}EMIN": fmt.emin,
        f"{of}M": fmt.mantissa_bits,
        f"{of}ZERO": fmt.has_negative_zero,
    }


def launch_gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous -> the same shape, and its largest magnitude (0-dim fp32)."""
    y = torch.empty_like(x)
    tiles = triton.cdiv(x.numel(), TILE)
    amax = new_amax(x.device)
    bits = amax.view(torch.int32)
    launch(
        gelu_forward, (tiles,), x, y, bits, x.numel(),
        writes="y_ptr", updates="amax_ptr", BLOCK=TILE, **FOUR_WARPS,
    )  # fmt: skip
    return y, amax


def launch_gelu_backward(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both contiguous -> the gradient of x, and its largest magnitude."""
    dx = torch.empty_like(x)
    tiles = triton.cdiv(x.numel(), TILE)
    amax = new_amax(x.device)
    bits = amax.view(torch.int32)
    launch(
        gelu_backward, (tiles,), dy, x, dx, bits, x.numel(),
        writes="dx_ptr", updates="amax_ptr", BLOCK=TILE, **FOUR_WARPS,
    )  # fmt: skip
    return dx, amax
