"""SwiGLU in tiles, written as FP8 codes: its result, and its gradient along both axes.

Under current scaling the scale comes from the tensor's amax, which an earlier pass has computed. Under
delayed scaling the scale is known in advance: one pass writes codes and computes the amax. Whether the amax
is finite is known only after the last tile, so a launch of a single program then writes the scale
(`delayed_scale`): a scale of NaN turns all codes into NaN.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.formats import Format
from narrowgauge.kernels.amax import DelayedScale, new_amax
from narrowgauge.kernels.triton.activation import (
    EIGHT_WARPS,
    FOUR_WARPS,
    swiglu_gradients,
    swiglu_of,
    tile_of,
    tiling,
)
from narrowgauge.kernels.triton.arithmetic import magnitude, wide
from narrowgauge.kernels.triton.launch import cdiv, launch, tl, triton
from narrowgauge.kernels.triton.rounding import code_of, is_converted, to_fp8, to_grid
from narrowgauge.kernels.triton.scales import INFINITE, fp32_scale

#: Rows and columns of a tile that is written along both axes: 64 contiguous bytes of codes in each.
SQUARE: dict[str, Any] = {"ROWS": 64, "COLS": 64}


@triton.jit
def scale_of(amax_ptr, MAX: tl.constexpr):
    """(factor, scale) of a tensor from its amax, [1]; the scale is NaN if that is not finite."""
    amax = tl.load(amax_ptr + tl.arange(0, 1))
    finite = (amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITE
    factor, scale = fp32_scale(tl.where(finite, amax, 0.0), MAX, False)
    return factor, tl.where(finite, scale, float("nan"))


@triton.jit
def codes_of(
    x, factor, scale, MAX: tl.constexpr, EMIN: tl.constexpr, M: tl.constexpr, ZERO: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """FP8 codes of values under a scale, rounded to nearest even; the codes of zeros under a scale of NaN."""
    x = tl.where((scale == scale)[:, None], wide(x), 0.0) * factor[:, None]
    if CONVERTS:
        code = to_fp8(x, MAX, M).to(tl.uint8, bitcast=True)
    else:
        k, e, sign = to_grid(x, 0.0, MAX, EMIN, M, "nearest-even", 24)
        code = code_of(k, e, sign, EMIN, M, 8, False, ZERO)
    return code


@triton.jit
def store_both(x, out_ptr, other_ptr, row, col, inside, rows, columns):
    """Store a tile along its rows, and along its columns."""
    tl.store(out_ptr + row * columns + col, x, inside)
    tl.store(other_ptr + col.to(tl.int64) * rows + row, x, inside)


@triton.jit
def swiglu_codes(
    gate_up_ptr, encode_ptr, codes_ptr, amax_ptr, rows, F, ROWS: tl.constexpr, COLS: tl.constexpr,
    MAX: tl.constexpr, EMIN: tl.constexpr, M: tl.constexpr, ZERO: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """FP8 codes of silu(gate) * up under a known scale."""
    row, col, inside = tile_of(rows, F, ROWS, COLS)
    y = swiglu_of(gate_up_ptr, row, col, inside, F, gate_up_ptr.dtype.element_ty)
    factor = tl.load(encode_ptr + tl.arange(0, 1))
    tl.store(codes_ptr + row * F + col, codes_of(y, factor, factor, MAX, EMIN, M, ZERO, CONVERTS), inside)
    tl.atomic_max(amax_ptr, tl.max(tl.max(magnitude(y), 1), 0), sem="relaxed")


@triton.jit
def delayed_scale(amax_ptr, encode_ptr, scale_ptr, seen_ptr):
    """A tensor's encoding scale, and its inverse, or NaN if the tensor is not finite; raises `seen`."""
    one = tl.arange(0, 1)
    bits = tl.load(amax_ptr + one).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    encode = tl.load(encode_ptr + one)
    tl.store(scale_ptr + one, encode)
    tl.store(scale_ptr + 1 + one, tl.where(bits < INFINITE, tl.math.div_rn(1.0, encode), float("nan")))
    if seen_ptr is not None:
        tl.atomic_max(seen_ptr + one, tl.where(bits < INFINITE, bits, 0), sem="relaxed")


@triton.jit
def swiglu_backward_codes(
    dy_ptr, gate_up_ptr, grad_amax_ptr, grad_encode_ptr, y_told_ptr, grad_ptr, grad_other_ptr, y_other_ptr,
    grad_scale_ptr, y_scale_ptr, rows, F, ROWS: tl.constexpr, COLS: tl.constexpr,
    MAX: tl.constexpr, EMIN: tl.constexpr, M: tl.constexpr, ZERO: tl.constexpr,
    Y_MAX: tl.constexpr, Y_EMIN: tl.constexpr, Y_M: tl.constexpr, Y_ZERO: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """FP8 codes of the gradients of gate and up, concatenated, along both axes; of y along its columns.

    Scales come from the amaxes, `grad_amax` and `y_told`. With `grad_encode` they are known: `y_told` is y's
    encoding scale and its inverse, and `grad_amax` is raised.
    """
    row, col, inside = tile_of(rows, F, ROWS, COLS)
    at = row * 2 * F + col
    dy = wide(tl.load(dy_ptr + row * F + col, inside, 0))
    gate = wide(tl.load(gate_up_ptr + at, inside, 0))
    up = wide(tl.load(gate_up_ptr + at + F, inside, 0))
    dgate, dup, y = swiglu_gradients(dy, gate, up, gate_up_ptr.dtype.element_ty)
    if grad_encode_ptr is None:
        factor, scale = scale_of(grad_amax_ptr, MAX)
        y_factor, y_scale = scale_of(y_told_ptr, Y_MAX)
        one = tl.arange(0, 1)
        is_first = tl.program_id(0) + one == 0
        tl.store(grad_scale_ptr + one, scale, is_first)
        tl.store(y_scale_ptr + one, y_scale, is_first)
    else:
        factor = tl.load(grad_encode_ptr + tl.arange(0, 1))
        scale = factor
        y_factor = tl.load(y_told_ptr + tl.arange(0, 1))
        y_scale = tl.load(y_told_ptr + 1 + tl.arange(0, 1))
        largest = tl.maximum(magnitude(dgate), magnitude(dup))
        tl.atomic_max(grad_amax_ptr, tl.max(tl.max(largest, 1), 0), sem="relaxed")
    code = codes_of(dgate, factor, scale, MAX, EMIN, M, ZERO, CONVERTS)
    store_both(code, grad_ptr, grad_other_ptr, row, col, inside, rows, 2 * F)
    code = codes_of(dup, factor, scale, MAX, EMIN, M, ZERO, CONVERTS)
    store_both(code, grad_ptr, grad_other_ptr, row, col + F, inside, rows, 2 * F)
    code = codes_of(y, y_factor, y_scale, Y_MAX, Y_EMIN, Y_M, Y_ZERO, CONVERTS)
    tl.store(y_other_ptr + col.to(tl.int64) * rows + row, code, inside)


class SwigluCodes(NamedTuple):
    """FP8 codes (uint8), scales (0-dim fp32) of M rows of SwiGLU's gradient [M, 2F] and result y [M, F]."""

    grad_M2F: Tensor
    grad_2FM: Tensor
    grad_scale: Tensor
    y_FM: Tensor
    y_scale: Tensor


def launch_swiglu_codes(gate_up_M2F: Tensor, y: Format, delayed: DelayedScale) -> tuple[Tensor, Tensor]:
    """y's codes [M, F] in the format `y`, its encoding scale and the inverse, fp32 (2,); contiguous input."""
    rows, F = gate_up_M2F.shape[0], gate_up_M2F.shape[1] // 2
    codes_MF = torch.empty(rows, F, dtype=torch.uint8, device=gate_up_M2F.device)
    amax = new_amax(codes_MF.device)
    tiles, tile = tiling(rows, F)
    launch(
        swiglu_codes, (tiles,), gate_up_M2F, delayed.encode, codes_MF, amax.view(torch.int32), rows, F,
        writes="codes_ptr", updates="amax_ptr", **tile, **code_constants(y, ""),
        CONVERTS=are_converted(codes_MF.device, y), **FOUR_WARPS,
    )  # fmt: skip
    return codes_MF, launch_delayed_scale(amax, delayed)


def launch_delayed_scale(amax: Tensor, delayed: DelayedScale) -> Tensor:
    """The encoding scale of a tensor and its inverse, (2,) fp32, once its amax is known."""
    scale_2 = torch.empty(2, dtype=torch.float32, device=amax.device)
    seen = None if delayed.seen is None else delayed.seen.view(torch.int32)
    launch(
        delayed_scale, (1,), amax, delayed.encode, scale_2, seen,
        writes="scale_ptr", updates="seen_ptr", **FOUR_WARPS,
    )  # fmt: skip
    return scale_2


def launch_swiglu_backward_codes(
    dy_MF: Tensor,
    gate_up_M2F: Tensor,
    grad_amax: Tensor,
    y_told: Tensor,
    grad: Format,
    y: Format,
    delayed: DelayedScale | None = None,
) -> SwigluCodes:
    """The gradient and y in the formats `grad` and `y`; contiguous inputs.

    Scales are computed from the amaxes `grad_amax` and `y_told` (0-dim fp32). With `delayed` the gradient's
    scale is known, `grad_amax` is raised from zero, and `y_told` is the second result of
    `launch_swiglu_codes`.
    """
    rows, F = dy_MF.shape
    grad_M2F, grad_2FM, y_FM = (
        torch.empty(shape, dtype=torch.uint8, device=dy_MF.device)
        for shape in ((rows, 2 * F), (2 * F, rows), (F, rows))
    )
    scales = y_told.new_empty(2) if delayed is None else y_told
    tiles = cdiv(rows, SQUARE["ROWS"]) * cdiv(F, SQUARE["COLS"])
    launch(
        swiglu_backward_codes, (tiles,),
        dy_MF, gate_up_M2F, grad_amax if delayed is None else grad_amax.view(torch.int32),
        None if delayed is None else delayed.encode, y_told,
        grad_M2F, grad_2FM, y_FM, scales[0], scales[1], rows, F,
        writes="grad_ptr grad_other_ptr y_other_ptr" + " grad_scale_ptr y_scale_ptr" * (delayed is None),
        updates="" if delayed is None else "grad_amax_ptr",
        **SQUARE, **code_constants(grad, ""), **code_constants(y, "Y_"),
        CONVERTS=are_converted(dy_MF.device, grad, y), **EIGHT_WARPS,
    )  # fmt: skip
    grad_scale = scales[0] if delayed is None else launch_delayed_scale(grad_amax, delayed)[1]
    return SwigluCodes(grad_M2F, grad_2FM, grad_scale, y_FM, scales[1])


def are_converted(device: torch.device, *formats: Format) -> bool:
    """Whether a GPU instruction rounds to all of these formats."""
    return all(is_converted(f, "nearest-even", device) for f in formats)


def code_constants(fmt: Format, of: str) -> dict[str, Any]:
    """An FP8 format as kernel constants."""
    return {
        f"{of}MAX": fmt.max,
        f"{of}EMIN": fmt.emin,
        f"{of}M": fmt.mantissa_bits,
        f"{of}ZERO": fmt.has_negative_zero,
    }
