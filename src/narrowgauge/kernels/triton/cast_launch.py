"""Launches the kernels of a cast: grids, tiles, memory for results."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from narrowgauge.formats import codes_of, format
from narrowgauge.kernels.amax import new_amax
from narrowgauge.kernels.triton import rounding
from narrowgauge.kernels.triton.cast import cast_blocks, cast_given, largest, tile_of
from narrowgauge.kernels.triton.launch import cdiv, launch
from narrowgauge.quantization import Cast, QTensor, QuantContext, operand_dtype
from narrowgauge.quantization.blocks import Blocks, blocks_of
from narrowgauge.quantization.scales import scales_from
from narrowgauge.quantization.transforms import hadamard, transform
from narrowgauge.system.devices import Device, imagined
from narrowgauge.system.torch_compat import unobserved

#: Instructions of a cast per element, in fp32 lanes, including the amax: (along the contraction, across it),
#: for values and for codes. They are counted on a multiprocessor's busiest pipe, in the machine code that
#: Triton 3.7 produces for sm_90, with each pipe at the rate given in the CUDA programming guide. Other GPUs
#: are assumed to need as many.
_LANES = {
    "tensor": ((36, 36), (39, 51)),
    "row": ((46, 63), (44, 74)),
    "square": ((59, 70), (56, 80)),  # 128 x 128
    "block": ((40, 82), (47, 102)),  # MX, 1 x 128
    "block, hadamard": ((53, 50), (70, 67)),
    "nvfp4": ((57, 128), (70, 157)),
    "nvfp4, square": ((67, 84), (77, 103)),
    "nvfp4, hadamard": ((73, 82), (93, 103)),
}
PADDED_ROWS, PADDED_COLUMNS = 16, 32  # units that multiply blocks take multiples of these
_LANES_OF_AMAX = 17  # for a tensor's amax, if it did not come with the tensor
_LANES_STOCHASTIC = 32  # extra, for one random value per element


class _View(NamedTuple):
    """A matrix as (rows, contraction), and the output that is written."""

    R: int
    K: int
    K_OUT: int
    x: tuple[int, ...]
    element: tuple[int, ...]  # strides in row-major order, which index the random bits
    shape: torch.Size  # of the result
    blocks: Blocks
    grid: tuple[int, ...]  # strides of a contiguous tensor with an entry per block

    def programs(self, tile: tuple[int, int]) -> tuple[int, int]:
        """The grid of a launch."""
        return -(-self.R // tile[0]), -(-self.K_OUT // tile[1])


@lru_cache(1024)  # a model has a few dozen
def _view(shape: torch.Size, strides: tuple[int, int], cast: Cast, axis: int) -> _View:
    R, K = _turned(shape, axis)
    K_OUT = K + -K % cast.hadamard if cast.hadamard else K
    out = torch.Size(_turned((R, K_OUT), axis))
    blocks = blocks_of(out, cast, axis)
    element, grid = (_turned((width, 1), axis) for width in (out[1], blocks.grid[1]))
    return _View(R, K, K_OUT, _turned(strides, axis), element, out, blocks, grid)


def _turned(pair: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """What a matrix has along (rows, columns), along (rows, contraction); and back."""
    return pair if axis == -1 else pair[::-1]


def _empty(view: _View, axis: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Memory for the output: codes contiguous along the contraction, as GEMMs read them, values by rows."""
    if dtype == torch.uint8 and axis == 0:
        return torch.empty(view.shape[::-1], dtype=dtype, device=like.device).T
    return torch.empty(view.shape, dtype=dtype, device=like.device)


def quantized(
    x: torch.Tensor, cast: Cast, axis: int, context: QuantContext, both: bool = False
) -> tuple[QTensor, torch.Tensor | None]:
    """The result of `quantization.quantize`, and with `both` the same codes along the other axis."""
    one = _one(x)
    if _scale_is_known_first(cast):
        codes, other, scales, blocks = _cast_given(x, cast, axis, torch.uint8, context, both)
        scale_codes = codes_of(scales, format(cast.scale)) if cast.has_coded_scales else None
        return QTensor(codes, scales, scale_codes, one, cast, blocks), other
    codes, blocks, scales, scale_codes, S = _cast_blocks(x, cast, axis, torch.uint8, context)
    return QTensor(codes, scales, scale_codes, one if S is None else S, cast, blocks), None


def in_tiles(
    x: torch.Tensor, cast: Cast, axis: int, context: QuantContext
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed codes, codes of scales in tiles, the tensor's scale): see `kernels.cast.quantize_in_tiles`."""
    codes, _, _, scale_codes, S = _cast_blocks(x, cast, axis, torch.uint8, context, in_tiles=True)
    assert scale_codes is not None
    return codes, scale_codes, _one(x) if S is None else S


@torch.no_grad()
def launch_amaxes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The amax of each of n tensors, (n,) float32."""
    amaxes = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    for x, amax in zip(tensors, amaxes.split(1), strict=True):
        if x.numel():
            x = x if x.ndim == 2 else x.reshape(-1, x.shape[-1] if x.ndim else 1)
            x = x if len(x) >= x.shape[1] else x.T  # only the first axis of a grid may be long
            tile = tile_of(x.stride(1))
            launch(
                largest, (cdiv(x.shape[0], tile[0]), cdiv(x.shape[1], tile[1])),
                x, amax, x, x, *x.shape, *x.stride(), 0, 0, 1, 1, updates="amax", HAS_AMAX=False,
                TR=tile[0], TK=tile[1], BR=1, BK=1, H=0, BY_ROW=False, IS_ONE=True, FINITE=False,
            )  # fmt: skip
    return amaxes.view(torch.float32)


_ONES: dict[tuple[torch.device, Device | None], torch.Tensor] = {}


def _one(like: torch.Tensor) -> torch.Tensor:
    """1 on the device of `like`, 0-dim float32, cached: a tensor scale of 1 is never written to."""
    key = (like.device, imagined(like.device))
    if key in _ONES:
        return _ONES[key]
    no_step = unobserved() if key[1] else nullcontext()  # of those that are simulated makes it again
    with no_step, torch.inference_mode(False):  # so that any graph may use it
        one = torch.ones((), dtype=torch.float32, device=like.device)
    if type(one) is torch.Tensor:  # a compiler's tensor belongs to its context
        _ONES[key] = one
    return one


def emulated(
    x: torch.Tensor, cast: Cast, axis: int, dtype: torch.dtype, context: QuantContext
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result of `quantization.emulate`."""
    out_dtype = operand_dtype(cast, dtype)
    if _scale_is_known_first(cast):
        values, _, scales, _ = _cast_given(x, cast, axis, out_dtype, context)
        return values, scales if cast.block is None else None
    values, *_, tensor_scale = _cast_blocks(x, cast, axis, out_dtype, context)
    return values, tensor_scale


def _scale_is_known_first(cast: Cast) -> bool:
    """Whether a scale covers more elements than a tile has: a row, 128 x 128 or more, or the tensor."""
    return cast.block is None or cast.block[1] == 0 or cast.block[0] >= 128


def _cast_given(
    x: torch.Tensor, cast: Cast, axis: int, dtype: torch.dtype, context: QuantContext, both: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, Blocks]:
    """(codes or values, the same along the other axis, scales in the grid of blocks or 0-dim, blocks).

    Scales in fp32 are computed by the casting kernel from amaxes; others by plain operations.
    """
    if cast.hadamard:
        x = hadamard(x, cast.hadamard, axis, context.signs_of(cast))
    view = _view(x.shape, x.stride(), cast, axis)
    blocks = view.blocks
    amax = None if cast.hadamard or cast.block is not None else context.amax
    if amax is None:
        amax = _largest(x, cast, axis)
    scale, seen, known_amax, divides = context.scale, context.amax_out, None, False
    from_amax = scale is None and cast.scale == "fp32"
    if from_amax:
        factor, block = amax, torch.empty(amax.shape, dtype=torch.float32, device=x.device)
    elif scale is not None and cast.block is None:
        factor, block, known_amax = scale, torch.empty((), dtype=torch.float32, device=x.device), amax
    else:
        scales = scales_from(amax.reshape(blocks.grid), cast, scale)
        factor, block = (s.contiguous().reshape(amax.shape) for s in (scales.encode, scales.block))
        divides = scales.divides
    tile, out = tile_of(view.x[1]), _empty(view, axis, dtype, x)
    other = _empty(view, -1 - axis, dtype, x) if both else None
    launch(
        cast_given, view.programs(tile),
        x, out, other, factor, block, known_amax, None if seen is None else seen.view(torch.int32),
        *rounding.stream_tensors(context.random, x), view.R, view.K, *view.x, *_turned(out.stride(), axis),
        *((0, 0) if other is None else _turned(other.stride(), axis)),
        *view.grid, *_turned(blocks.size, axis), *view.element,
        writes="out other block" if known_amax is not None or from_amax else "out other", updates="seen",
        lanes=_lanes(x.shape, cast, axis, dtype), TR=tile[0], TK=tile[1], **_rounding(cast, x, dtype),
        BY_ROW=_is_by_row(cast), IS_ONE=max(blocks.grid) == 1, TIMES_SCALE=cast.block is not None,
        DIVIDES=divides, FROM_AMAX=from_amax,
    )  # fmt: skip
    if cast.block is not None and not block.ndim:
        block = block.reshape(blocks.grid)
    return out, other, block, blocks


def _rounding(cast: Cast, x: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """How elements are rounded, as kernel constants."""
    return {
        "G": rounding.grid_of(cast.element, cast.rounding, cast.random_bits),
        "CODES": dtype == torch.uint8,
        "CONVERTS": rounding.is_converted(cast.element, cast.rounding, x.device),
        "AIM": cast.aim,
        "POWER_OF_TWO": cast.power_of_two,
    }


def _cast_blocks(
    x: torch.Tensor, cast: Cast, axis: int, dtype: torch.dtype, context: QuantContext, in_tiles: bool = False
) -> tuple[torch.Tensor, Blocks, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(codes or values, blocks, scales, their codes, the tensor's scale).

    `in_tiles`: codes packed and padded, codes of scales in tiles, no scales.
    """
    assert cast.block is not None
    over = tensor_scale = scale_codes = None
    of_scale = format(cast.scale)
    matrix = transform(cast.hadamard, context.signs_of(cast), x) if cast.hadamard else None
    if cast.tensor_scale != "none":
        over = _largest(x, cast, axis, matrix, context.amax)
        tensor_scale = torch.empty((), dtype=torch.float32, device=x.device)
    view, codes = _view(x.shape, x.stride(), cast, axis), dtype == torch.uint8
    blocks, has_scales = view.blocks, codes and not in_tiles
    grid = _turned(blocks.grid, axis)
    tile, programs, extent = tile_of(view.x[1], cast.block[1]), view, (view.R, view.K_OUT)
    if in_tiles:
        rows, across = cdiv(view.R, 128), cdiv(grid[1], 4)
        programs = view._replace(R=128 * rows, K_OUT=4 * across * cast.block[1])
        extent = view.R + -view.R % PADDED_ROWS, view.K_OUT + -view.K_OUT % PADDED_COLUMNS
        packed = extent[0], extent[1] * cast.element.bits // 8
        out = torch.empty(packed, dtype=torch.uint8, device=x.device)
        scale_codes = torch.empty((512 * rows * across,), dtype=torch.uint8, device=x.device)
    else:
        out = _empty(view, axis, dtype, x)
        if codes and cast.has_coded_scales:
            scale_codes = torch.empty(blocks.grid, dtype=torch.uint8, device=x.device)
    scales = torch.empty(blocks.grid if has_scales else (), dtype=torch.float32, device=x.device)
    launch(
        cast_blocks, programs.programs(tile),
        x, out, scales, scales if scale_codes is None else scale_codes, scales if over is None else over,
        scales if tensor_scale is None else tensor_scale, x if matrix is None else matrix,
        *rounding.stream_tensors(context.random, x), view.R, view.K, *extent, *grid, *view.x,
        *(out.stride() if in_tiles else _turned(out.stride(), axis)), *view.grid, *view.element,
        writes="out scales scale_codes tensor_scale", lanes=_lanes(x.shape, cast, axis, dtype),
        TR=tile[0], TK=tile[1], BR=cast.block[0], BK=cast.block[1], H=cast.hadamard,
        **_rounding(cast, x, dtype), SCALE="rounded" if cast.has_rounded_scales else cast.scale,
        S=rounding.grid_of(of_scale), S_NAN=of_scale.nan_code if of_scale.bits == 8 else 0,
        RULE=cast.scale_rule, INVERSE_LARGEST=1 / cast.aim, EMAX=cast.element.emax,
        FRACTION=cast.element.fraction_bits, LARGEST=cast.target * cast.aim, IN_TILES=in_tiles,
    )  # fmt: skip
    return out, blocks, scales, scale_codes, tensor_scale


def _largest(
    x: torch.Tensor,
    cast: Cast,
    axis: int,
    matrix: torch.Tensor | None = None,
    known: torch.Tensor | None = None,
) -> torch.Tensor:
    """The amax of each block, float32 in their grid, 0-dim for one; for NVFP4 that of all finite blocks.

    For NVFP4 the `known` one is used, without a read, if it is finite.
    """
    known = known if cast.tensor_scale != "none" and matrix is None else None
    view, finite = _view(x.shape, x.stride(), cast, axis), cast.tensor_scale != "none"
    BR, BK = cast.block if finite and cast.block else (1, 1)
    is_one = finite or max(view.blocks.grid) == 1
    if is_one:
        amax = new_amax(x.device)
        bits = amax.view(torch.int32)
    else:
        bits = torch.zeros(view.blocks.grid, dtype=torch.int32, device=x.device)
        amax = bits.view(torch.float32)
    tile = tile_of(view.x[1])
    launch(
        largest, view.programs(tile),
        x, bits, x if matrix is None else matrix, x if known is None else known, view.R, view.K, *view.x,
        *((1, 1) if is_one else view.grid),
        *((2**30, 2**30) if finite else _turned(view.blocks.size, axis)),
        updates="amax", seldom="" if known is None else "x", HAS_AMAX=known is not None,
        TR=tile[0], TK=tile[1], BR=BR, BK=BK, H=0 if matrix is None else len(matrix),
        BY_ROW=_is_by_row(cast), IS_ONE=is_one, FINITE=finite,
        lanes=_LANES_OF_AMAX * x.numel() if cast.block is None else 0.0,
    )  # fmt: skip
    return amax


@lru_cache(1024)
def _lanes(shape: torch.Size, cast: Cast, axis: int, dtype: torch.dtype) -> float:
    """The instructions of a cast, for `GpuWork.lanes`."""
    of_an_element = _LANES[_kind(cast)][dtype == torch.uint8][axis == 0]
    return shape.numel() * float(of_an_element + _LANES_STOCHASTIC * (cast.rounding == "stochastic"))


def _kind(cast: Cast) -> str:
    """The row of `_LANES` that a cast belongs to."""
    if cast.tensor_scale != "none":
        is_square = cast.block is not None and cast.block[0] > 1
        return "nvfp4, square" if is_square else "nvfp4, hadamard" if cast.hadamard else "nvfp4"
    if cast.block is None:
        return "tensor"
    if _scale_is_known_first(cast):
        return "row" if _is_by_row(cast) else "square"
    return "block, hadamard" if cast.hadamard else "block"


def _is_by_row(cast: Cast) -> bool:
    return cast.block is not None and cast.block[1] == 0
