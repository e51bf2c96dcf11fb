"""Launches the kernels of a cast: grids, tiles, memory for results."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from narrowgauge.devices import Device, imagined
from narrowgauge.formats import RandomStream, encode, format
from narrowgauge.kernels.amax import DelayedScale, new_amax
from narrowgauge.kernels.triton.cast import LAUNCH, cast_blocks, cast_given, largest, tile_of
from narrowgauge.kernels.triton.launch import launch, triton
from narrowgauge.kernels.triton.rounding import facts, facts_of_scale, is_converted
from narrowgauge.quantization import Cast, QTensor
from narrowgauge.quantization.block_scales import scales_from
from narrowgauge.quantization.blocks import Blocks, blocks_of
from narrowgauge.quantization.stages.hadamard import hadamard, transform

Signs = torch.Tensor | tuple[int, ...]
#: Instructions of a cast per element, in fp32 lanes, including the amax: (along the contraction, across it),
#: for values and for codes. They are those of a multiprocessor's busiest pipe, in the machine code that
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
    x: tuple[int, int]
    element: tuple[int, int]  # strides in row-major order, which index the random bits
    shape: torch.Size  # of the result


def _view(x: torch.Tensor, cast: Cast, axis: int) -> _View:
    R, K = x.shape if axis == -1 else (x.shape[1], x.shape[0])
    K_OUT = K + -K % cast.hadamard.size if cast.hadamard.size else K
    s0, s1 = x.stride()
    if axis == -1:
        return _View(R, K, K_OUT, (s0, s1), (K_OUT, 1), torch.Size((R, K_OUT)))
    return _View(R, K, K_OUT, (s1, s0), (1, R), torch.Size((K_OUT, R)))


def _empty(view: _View, axis: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Memory for the output: codes contiguous along the contraction, as GEMMs read them, values by rows."""
    if dtype == torch.uint8 and axis == 0:
        return torch.empty(view.shape[::-1], dtype=dtype, device=like.device).T
    return torch.empty(view.shape, dtype=dtype, device=like.device)


def _strides(out: torch.Tensor, axis: int) -> tuple[int, int]:
    """The strides of rows and of the contraction."""
    return (out.stride(0), out.stride(1)) if axis == -1 else (out.stride(1), out.stride(0))


@torch.no_grad()
def quantized(
    x: torch.Tensor,
    cast: Cast,
    axis: int,
    stream: RandomStream | None,
    signs: Signs,
    delayed: DelayedScale,
    known: torch.Tensor | None = None,
    both: bool = False,
) -> tuple[QTensor, torch.Tensor | None]:
    """The result of `quantization.quantize`, and with `both` the same codes along the other axis.

    `known` is max |x|, 0-dim fp32, if the kernel that wrote x has computed it.
    """
    one = _one(x)
    if _scale_is_known_first(cast):
        codes, other, scales, blocks = _cast_given(
            x, cast, axis, torch.uint8, stream, signs, delayed, known, both
        )
        scales = scales.reshape(() if cast.block is None else blocks.grid)
        scale_codes = encode(scales, format(cast.scales.format)) if cast.scales.are_codes else None
        return QTensor(codes, scales, scale_codes, one, cast, blocks), other
    codes, blocks, scales, scale_codes, S = _cast_blocks(x, cast, axis, torch.uint8, stream, signs, known)
    return QTensor(codes, scales, scale_codes, one if S is None else S, cast, blocks), None


@torch.no_grad()
def in_tiles(
    x: torch.Tensor,
    cast: Cast,
    axis: int,
    stream: RandomStream | None,
    signs: Signs,
    known: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed codes, codes of scales in tiles, the tensor's scale): see `kernels.cast.quantize_in_tiles`."""
    codes, _, _, scale_codes, S = _cast_blocks(x, cast, axis, torch.uint8, stream, signs, known, True)
    assert scale_codes is not None
    return codes, scale_codes, _one(x) if S is None else S


@torch.no_grad()
def launch_codes(x: torch.Tensor, cast: Cast, encode: torch.Tensor, decode: torch.Tensor) -> torch.Tensor:
    """The uint8 codes of a matrix under one scale, 0-dim fp32 (encode, decode); 0 where decode is NaN."""
    view = _view(x, cast, -1)
    scales = encode.view(1, 1), decode.view(1, 1)
    return _launch_given(x, cast, -1, view, blocks_of(view.shape, cast, -1), torch.uint8, None, *scales)[0]


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
                largest, (triton.cdiv(x.shape[0], tile[0]), triton.cdiv(x.shape[1], tile[1])),
                x, amax, x, x, *x.shape, *x.stride(), 0, 0, 1, 1, updates="amax", IS_TOLD=False,
                TR=tile[0], TK=tile[1], BR=1, BK=1, H=0, BY_ROW=False, IS_ONE=True, FINITE=False, **LAUNCH,
            )  # fmt: skip
    return amaxes.view(torch.float32)


_ONES: dict[tuple[torch.device, Device | None], torch.Tensor] = {}


def _one(like: torch.Tensor) -> torch.Tensor:
    """1 on the device of `like`, 0-dim float32, cached: a tensor scale of 1 is never written to."""
    key = (like.device, imagined(like.device))
    if key in _ONES:
        return _ONES[key]
    with torch.inference_mode(False):  # so that any graph may use it
        one = torch.ones((), dtype=torch.float32, device=like.device)
    if type(one) is torch.Tensor:  # a compiler's tensor belongs to its context
        _ONES[key] = one
    return one


@torch.no_grad()
def emulated(
    x: torch.Tensor,
    cast: Cast,
    axis: int,
    dtype: torch.dtype,
    stream: RandomStream | None,
    signs: Signs,
    delayed: DelayedScale,
    known: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result of `quantization.emulate`; `known` as for `quantized`."""
    is_exact = cast.block is None or cast.is_exact_in_bf16
    out_dtype = dtype if is_exact else torch.float32
    if _scale_is_known_first(cast):
        values, _, scales, _ = _cast_given(x, cast, axis, out_dtype, stream, signs, delayed, known)
        return values, scales.reshape(()) if cast.block is None else None
    values, *_, tensor_scale = _cast_blocks(x, cast, axis, out_dtype, stream, signs, known)
    return values, tensor_scale


def _scale_is_known_first(cast: Cast) -> bool:
    """Whether a scale covers more elements than a tile has: a row, 128 x 128 or more, or the tensor."""
    return cast.block is None or cast.block[1] == 0 or cast.block[0] >= 128


def _cast_given(
    x: torch.Tensor,
    cast: Cast,
    axis: int,
    dtype: torch.dtype,
    stream: RandomStream | None,
    signs: Signs,
    delayed: DelayedScale,
    known: torch.Tensor | None = None,
    both: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, Blocks]:
    """(codes or values, the same along the other axis, scales, blocks).

    Scales in fp32 are computed by the casting kernel from amaxes; others by plain operations.
    """
    if cast.hadamard.size:
        x, known = hadamard(x, cast.hadamard.size, axis, signs), None
    view = _view(x, cast, axis)
    blocks = blocks_of(view.shape, cast, axis)
    if known is None or cast.block is not None:
        known = _largest(x, cast, view, axis, blocks)
    amax = known.reshape(blocks.grid)
    (scale, seen), told, divides = delayed, None, False
    from_amax = scale is None and cast.scales.format == "fp32"
    if from_amax:
        factor, block = amax, torch.empty_like(amax)
    elif scale is not None and cast.block is None:
        factor, block, told = scale, torch.empty_like(amax), amax
    else:
        scales = scales_from(amax, cast, scale)
        factor, block, divides = scales.encode.contiguous(), scales.block.contiguous(), scales.divides
    ways = divides, from_amax, both, told, seen if told is None or seen is None else seen.view(torch.int32)
    out, other = _launch_given(x, cast, axis, view, blocks, dtype, stream, factor, block, *ways)
    return out, other, block, blocks


def _launch_given(
    x: torch.Tensor,
    cast: Cast,
    axis: int,
    view: _View,
    blocks: Blocks,
    dtype: torch.dtype,
    stream: RandomStream | None,
    factor: torch.Tensor,
    block: torch.Tensor,
    divides: bool = False,
    from_amax: bool = False,
    both: bool = False,
    told: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(codes or values, the same along the other axis) under given factors, or those of amaxes."""
    out = _empty(view, axis, dtype, x)
    other = _empty(view, -1 - axis, dtype, x) if both else None
    tile = tile_of(view.x[1])
    launch(
        cast_given, _grid(view, tile),
        x, out, out if other is None else other, factor, block, told, seen, *_random(x, stream),
        view.R, view.K, *view.x, *_strides(out, axis), *_strides(out if other is None else other, axis),
        *_strides(block, axis), *_extents(blocks, axis), *view.element,
        writes="out other" if told is None and not from_amax else "out other block", updates="seen",
        TR=tile[0], TK=tile[1], BY_ROW=_is_by_row(cast), IS_ONE=block.numel() == 1,
        **facts(cast.element), ROUNDING=cast.rounding.mode, RANDOM_BITS=cast.rounding.random_bits,
        CODES=dtype == torch.uint8, TIMES_SCALE=cast.block is not None, DIVIDES=divides, BOTH=both,
        FROM_AMAX=from_amax, AIM=cast.aim, POWER_OF_TWO=cast.scales.power_of_two,
        CONVERTS=is_converted(cast.element, cast.rounding.mode, x.device),
        lanes=_lanes(x, cast, axis, dtype), **LAUNCH,
    )  # fmt: skip
    return out, other


def _cast_blocks(
    x: torch.Tensor,
    cast: Cast,
    axis: int,
    dtype: torch.dtype,
    stream: RandomStream | None,
    signs: Signs,
    known: torch.Tensor | None = None,
    in_tiles: bool = False,
) -> tuple[torch.Tensor, Blocks, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(codes or values, blocks, scales, their codes, the tensor's scale).

    `in_tiles`: codes packed and padded, codes of scales in tiles, no scales.
    """
    assert cast.block is not None
    view = _view(x, cast, axis)
    blocks = blocks_of(view.shape, cast, axis)
    matrix = transform(cast.hadamard.size, signs, x) if cast.hadamard.size else None
    over = tensor_scale = None
    if cast.scales.outer != "none":
        over = _largest(x, cast, view, axis, blocks, matrix, known)
        tensor_scale = torch.empty((), dtype=torch.float32, device=x.device)
    codes = dtype == torch.uint8
    grid, how = blocks.grid if axis == -1 else blocks.grid[::-1], cast.scales
    tile, programs = tile_of(view.x[1], cast.block[1]), view
    extent, strides = (view.R, view.K_OUT), (0, 0)
    if in_tiles:
        rows, across = (-(-n // of) for n, of in ((view.R, 128), (grid[1], 4)))
        programs = view._replace(R=128 * rows, K_OUT=4 * across * cast.block[1])
        extent = view.R + -view.R % PADDED_ROWS, view.K_OUT + -view.K_OUT % PADDED_COLUMNS
        packed = extent[0], extent[1] * cast.element.bits // 8
        out = torch.empty(packed, dtype=torch.uint8, device=x.device)
        scales = torch.empty((), dtype=torch.float32, device=x.device)
        scale_codes: torch.Tensor | None = torch.empty(
            (512 * rows * across,), dtype=torch.uint8, device=x.device
        )
        out_strides = out.stride(0), 1
    else:
        out = _empty(view, axis, dtype, x)
        scales = torch.empty(blocks.grid if codes else (), dtype=torch.float32, device=x.device)
        has_codes = codes and how.are_codes
        scale_codes = torch.empty(blocks.grid, dtype=torch.uint8, device=x.device) if has_codes else None
        strides, out_strides = _strides(scales, axis) if codes else (0, 0), _strides(out, axis)
    launch(
        cast_blocks, _grid(programs, tile),
        x, out, scales, scales if scale_codes is None else scale_codes, scales if over is None else over,
        scales if tensor_scale is None else tensor_scale,
        x if matrix is None else matrix, *_random(x, stream),
        view.R, view.K, *extent, *grid, *view.x, *out_strides, *strides, *view.element,
        writes="out scales scale_codes tensor_scale",
        TR=tile[0], TK=tile[1], BR=cast.block[0], BK=cast.block[1], H=cast.hadamard.size,
        **facts(cast.element), ROUNDING=cast.rounding.mode, RANDOM_BITS=cast.rounding.random_bits,
        SCALE="rounded" if how.are_rounded else how.format, **facts_of_scale(how.format),
        RULE=how.rule, POWER_OF_TWO=how.power_of_two, AIM=cast.aim, INVERSE_LARGEST=1 / cast.aim,
        EMAX=cast.element.emax, FRACTION=cast.element.fraction_bits, CODES=codes,
        LARGEST=cast.target * cast.aim,
        CONVERTS=is_converted(cast.element, cast.rounding.mode, x.device), IN_TILES=in_tiles,
        lanes=_lanes(x, cast, axis, dtype), **LAUNCH,
    )  # fmt: skip
    return out, blocks, scales, scale_codes, tensor_scale


def _largest(
    x: torch.Tensor,
    cast: Cast,
    view: _View,
    axis: int,
    blocks: Blocks,
    matrix: torch.Tensor | None = None,
    known: torch.Tensor | None = None,
) -> torch.Tensor:
    """The amax of each block, float32 in their grid; for NVFP4 that of all finite blocks.

    For NVFP4 the `known` one is used, without a read, if it is finite.
    """
    finite = cast.scales.outer != "none"
    known = known if finite and matrix is None else None
    BR, BK = cast.block if finite and cast.block else (1, 1)
    if finite or max(blocks.grid) == 1:
        amax = new_amax(x.device).view(torch.int32).reshape(1, 1)
    else:
        amax = torch.zeros(blocks.grid, dtype=torch.int32, device=x.device)
    tile = tile_of(view.x[1])
    launch(
        largest, _grid(view, tile),
        x, amax, x if matrix is None else matrix, x if known is None else known,
        view.R, view.K, *view.x, *_strides(amax, axis),
        *((2**30, 2**30) if finite else _extents(blocks, axis)), updates="amax",
        seldom="" if known is None else "x", IS_TOLD=known is not None,
        TR=tile[0], TK=tile[1], BR=BR, BK=BK, H=0 if matrix is None else len(matrix),
        BY_ROW=_is_by_row(cast), IS_ONE=amax.numel() == 1, FINITE=finite,
        lanes=_LANES_OF_AMAX * x.numel() if cast.block is None else 0.0, **LAUNCH,
    )  # fmt: skip
    return amax.view(torch.float32)


def _lanes(x: torch.Tensor, cast: Cast, axis: int, dtype: torch.dtype) -> float:
    """The instructions of a cast of `x`, for `GpuWork.lanes`."""
    of_an_element = _LANES[_kind(cast)][dtype == torch.uint8][axis == 0]
    return x.numel() * float(of_an_element + _LANES_STOCHASTIC * (cast.rounding.mode == "stochastic"))


def _kind(cast: Cast) -> str:
    """The row of `_LANES` that a cast belongs to."""
    if cast.scales.outer != "none":
        is_square = cast.block is not None and cast.block[0] > 1
        return "nvfp4, square" if is_square else "nvfp4, hadamard" if cast.hadamard.size else "nvfp4"
    if cast.block is None:
        return "tensor"
    if _scale_is_known_first(cast):
        return "row" if _is_by_row(cast) else "square"
    return "block, hadamard" if cast.hadamard.size else "block"


def _is_by_row(cast: Cast) -> bool:
    return cast.block is not None and cast.block[1] == 0


def _extents(blocks: Blocks, axis: int) -> tuple[int, ...]:
    """The rows and the contraction of a block."""
    return blocks.size if axis == -1 else blocks.size[::-1]


def _grid(view: _View, tile: tuple[int, int]) -> tuple[int, int]:
    return triton.cdiv(view.R, tile[0]), triton.cdiv(view.K_OUT, tile[1])


def _random(x: torch.Tensor, stream: RandomStream | None) -> tuple[Any, Any]:
    """The key of a stream and the index of its first element, as tensors on the device."""
    if stream is None:
        return x, x
    offset = stream.offset
    if not isinstance(offset, torch.Tensor):
        offset = torch.full((), offset, dtype=torch.int64, device=x.device)
    return stream.key, offset
