"""Casts in tiles of a matrix: to codes, or to the values that they represent.

A matrix is viewed as (rows R, contraction K), whichever of the two is contiguous in memory: `x_R` and `x_K`
are strides, `out_*` of the output, `grid_*` of the scales. So one kernel serves both axes, and
its output may be laid out along the other axis than its input.

    cast_blocks     scales of blocks that fit a tile: read once, written once
    largest         amax of each row, larger block, or tensor (NVFP4: of its finite blocks)
    cast_given      under known scales, one per row, block or tensor; along one axis or both

A tile has 4096 elements, 32 per thread: four 16-byte loads from bf16. With 8 per thread, addresses, bounds
checks and cross-thread maxima doubled the instruction count of a cast: according to the assembler for an H100
a cast to E4M3 took 34 instructions per element instead of 15, and to MXFP8 along the axis that is not
contiguous 65 instead of 25, while memory moves 4 bytes in the time of some 29.
"""

from narrowgauge.kernels.triton import rounding
from narrowgauge.kernels.triton.arithmetic import INFINITE, dot, magnitude, narrow, wide
from narrowgauge.kernels.triton.launch import tl, triton


@triton.jit
def _load(x, r, k, R, K, x_R, x_K, matrix, TR: tl.constexpr, TK: tl.constexpr, H: tl.constexpr):
    """Load a tile as float32, zeros out of bounds, after a Hadamard transform in groups of H."""
    inside = (r < R)[:, None] & (k < K)[None, :]
    tile = tl.load(x + r[:, None].to(tl.int64) * x_R + k[None, :].to(tl.int64) * x_K, mask=inside, other=0.0)
    if H:
        h = tl.arange(0, H)
        transform = tl.load(matrix + h[:, None] * H + h[None, :])
        groups = tl.reshape(tile, (TR * TK // H, H))
        tile = tl.reshape(narrow(dot(groups, transform), tile.dtype), (TR, TK))
    return wide(tile)


@triton.jit
def _largest_bits(tile, TR: tl.constexpr, TK: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """The bits of the amax of each block of BR x BK: [TR / BR, TK / BK] int32."""
    return tl.max(tl.max(tl.reshape(magnitude(tile), (TR // BR, BR, TK // BK, BK)), 3), 1)


@triton.jit
def _over_blocks(scale, TR: tl.constexpr, TK: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """Broadcast each block's value to its elements."""
    wide = tl.broadcast_to(scale[:, None, :, None], (TR // BR, BR, TK // BK, BK))
    return tl.reshape(wide, (TR, TK))


@triton.jit
def _store(out, value, r, k, R, K, out_R, out_K):
    where = r[:, None].to(tl.int64) * out_R + k[None, :].to(tl.int64) * out_K
    tl.store(out + where, narrow(value, out.dtype.element_ty), mask=(r < R)[:, None] & (k < K)[None, :])


@triton.jit
def _store_packed(out, code, r, TR: tl.constexpr, TK: tl.constexpr, R, K, out_R):
    """Codes of 4 bits, two a byte, the first in the low half; R and K are numbers of elements."""
    low, high = tl.split(tl.reshape(code, (TR, TK // 2, 2)))
    pair = tl.program_id(1) * (TK // 2) + tl.arange(0, TK // 2)
    _store(out, low | (high << 4), r, pair, R, K // 2, out_R, 1)


@triton.jit
def _store_in_tiles(
    out, code, r, R_OUT, GRID_R, GRID_K,
    TR: tl.constexpr, TK: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Codes of scales in tiles of 128 rows x 4 blocks (`nn.gemm.tiled`): zeros where there is no block."""
    code = tl.broadcast_to(code[:, None, :], (TR // BR, BR, TK // BK))
    code = tl.reshape(code, (TR, TK // BK))
    j = tl.program_id(1) * (TK // BK) + tl.arange(0, TK // BK)
    code = tl.where(((r < R_OUT) & (r // BR < GRID_R))[:, None] & (j < GRID_K)[None, :], code, 0)
    across = (GRID_K + 3) // 4
    tile = (r // 128)[:, None].to(tl.int64) * across + (j // 4)[None, :]
    at = tile * 512 + (r % 32 * 16 + r % 128 // 32 * 4)[:, None] + (j % 4)[None, :]
    exists = (r < (R_OUT + 127) // 128 * 128)[:, None] & (j < across * 4)[None, :]
    tl.store(out + at, narrow(code, out.dtype.element_ty), mask=exists)


@triton.jit
def _rounded(
    scaled, key, offset, r, k, element_R, element_K,
    G: tl.constexpr, CODES: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Elements in units of their scale, rounded: their codes, or their values as float32.

    Each element's random bits follow from its index in row-major order.
    """
    if CONVERTS:
        value = rounding.to_fp8(scaled, G)
        value = value.to(tl.uint8, bitcast=True) if CODES else value.to(tl.float32)
    else:
        random = 0.0
        if G[rounding.ROUNDING] == "stochastic":
            index = r[:, None].to(tl.int64) * element_R + k[None, :].to(tl.int64) * element_K
            random = rounding.uniform(key, tl.load(offset) + index)
        n, e, sign = rounding.to_grid(scaled, random, G)
        value = rounding.code_of(n, e, sign, G) if CODES else rounding.value_of(n, e, sign, G)
    return value


@triton.jit
def cast_blocks(
    x, out, scales, scale_codes, over, tensor_scale, matrix, key, offset,
    R, K, R_OUT, K_OUT, GRID_R, GRID_K, x_R, x_K, out_R, out_K, grid_R, grid_K, element_R, element_K,
    TR: tl.constexpr, TK: tl.constexpr, G: tl.constexpr, CODES: tl.constexpr, CONVERTS: tl.constexpr,
    AIM: tl.constexpr, POWER_OF_TWO: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, H: tl.constexpr,
    SCALE: tl.constexpr, S: tl.constexpr, S_NAN: tl.constexpr, RULE: tl.constexpr,
    INVERSE_LARGEST: tl.constexpr, EMAX: tl.constexpr, FRACTION: tl.constexpr, LARGEST: tl.constexpr,
    IN_TILES: tl.constexpr,
):  # fmt: skip
    """One tile: the scales of its blocks, and its elements as codes or as values times their block's scale.

    For NVFP4 this also computes the tensor scale from the tensor's amax `over`, mapped to LARGEST. IN_TILES
    writes what the hardware reads: packed codes of R_OUT x K_OUT elements, zeros beyond the matrix, and the
    codes of scales in tiles, without the scales.
    """
    r = tl.program_id(0) * TR + tl.arange(0, TR)
    k = tl.program_id(1) * TK + tl.arange(0, TK)
    tile = _load(x, r, k, R, K, x_R, x_K, matrix, TR, TK, H)
    bits = _largest_bits(tile, TR, TK, BR, BK)
    finite = bits < INFINITE
    amax = tl.where(finite, bits, 0).to(tl.float32, bitcast=True)
    if SCALE == "e8m0":
        code = rounding.e8m0_code(amax, RULE, INVERSE_LARGEST, EMAX, FRACTION)
        encode, block = rounding.power_of_two(254 - code), rounding.power_of_two(code)
        code = tl.where(finite, code, 255)
    elif SCALE == "e4m3":
        outer, undo = rounding.nvfp4_tensor_scale(tl.load(over), LARGEST)
        tl.store(tensor_scale, undo, mask=(tl.program_id(0) == 0) & (tl.program_id(1) == 0))
        encode, block, code = rounding.nvfp4_scale(amax, outer, INVERSE_LARGEST, S)
        code = tl.where(finite, code, 127)
    elif SCALE == "rounded":
        encode, block, code = rounding.rounded_scale(amax, AIM, S)
        code = tl.where(finite, code, S_NAN)
    else:
        encode, block = rounding.fp32_scale(amax, AIM, POWER_OF_TWO)
    block = tl.where(finite, block, float("nan"))
    tile = tl.where(_over_blocks(finite.to(tl.int32), TR, TK, BR, BK) != 0, tile, 0.0)
    encode = _over_blocks(encode, TR, TK, BR, BK)
    scaled = tl.math.div_rn(tile, encode) if SCALE == "rounded" else tile * encode
    value = _rounded(scaled, key, offset, r, k, element_R, element_K, G, CODES, CONVERTS)
    if IN_TILES:
        if G[rounding.BITS] == 4:
            _store_packed(out, value, r, TR, TK, R_OUT, K_OUT, out_R)
        else:
            _store(out, value, r, k, R_OUT, K_OUT, out_R, 1)
        _store_in_tiles(scale_codes, code, r, R_OUT, GRID_R, GRID_K, TR, TK, BR, BK)
    elif CODES:
        _store(out, value, r, k, R, K_OUT, out_R, out_K)
        i = tl.program_id(0) * (TR // BR) + tl.arange(0, TR // BR)
        j = tl.program_id(1) * (TK // BK) + tl.arange(0, TK // BK)
        _store(scales, block, i, j, GRID_R, GRID_K, grid_R, grid_K)
        if S_NAN:
            _store(scale_codes, code, i, j, GRID_R, GRID_K, grid_R, grid_K)
    else:
        value = value * _over_blocks(block, TR, TK, BR, BK)
        _store(out, value, r, k, R, K_OUT, out_R, out_K)


@triton.jit
def largest(
    x, amax, matrix, known_amax, R, K, x_R, x_K, amax_R, amax_K, block_R, block_K,
    TR: tl.constexpr, TK: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, H: tl.constexpr,
    BY_ROW: tl.constexpr, IS_ONE: tl.constexpr, FINITE: tl.constexpr, HAS_AMAX: tl.constexpr,
):  # fmt: skip
    """The bits of the amax of each row or block that a tile lies in, into int32 zeros.

    FINITE skips small blocks (BR x BK) that are not finite. A maximum does not depend on order, so it may be
    atomic. With HAS_AMAX the overall amax is known; if it is finite, nothing is read.
    """
    is_read = True
    if HAS_AMAX:
        known = magnitude(tl.load(known_amax))
        is_read = known >= INFINITE
        tl.store(amax, known, mask=(known < INFINITE) & (tl.program_id(0) + tl.program_id(1) == 0))
    if is_read:
        r = tl.program_id(0) * TR + tl.arange(0, TR)
        k = tl.program_id(1) * TK + tl.arange(0, TK)
        tile = _load(x, r, k, R, K, x_R, x_K, matrix, TR, TK, H)
        bits = _largest_bits(tile, TR, TK, BR, BK)
        if FINITE:
            bits = tl.where(bits < INFINITE, bits, 0)
        if BY_ROW:
            tl.atomic_max(amax + r * amax_R, tl.max(bits, 1), mask=r < R, sem="relaxed")
        elif IS_ONE:
            tl.atomic_max(amax, tl.max(tl.max(bits, 1), 0), sem="relaxed")
        else:
            at = tl.program_id(0) * TR // block_R * amax_R + tl.program_id(1) * TK // block_K * amax_K
            tl.atomic_max(amax + at, tl.max(tl.max(bits, 1), 0), sem="relaxed")


@triton.jit
def cast_given(
    x, out, other, encode, block, known_amax, seen, key, offset,
    R, K, x_R, x_K, out_R, out_K, other_R, other_K, scale_R, scale_K, block_R, block_K, element_R, element_K,
    TR: tl.constexpr, TK: tl.constexpr, G: tl.constexpr, CODES: tl.constexpr, CONVERTS: tl.constexpr,
    AIM: tl.constexpr, POWER_OF_TWO: tl.constexpr, BY_ROW: tl.constexpr, IS_ONE: tl.constexpr,
    TIMES_SCALE: tl.constexpr, DIVIDES: tl.constexpr, FROM_AMAX: tl.constexpr,
):  # fmt: skip
    """One tile under the scales of its rows, or of the block that it lies in: NaN if that is not finite.

    With FROM_AMAX `encode` holds amaxes: the scale is computed from them here, and the first tile of a row or
    block writes it to `block`. With a tensor's `known_amax`, `encode` is a scale from an earlier step;
    the first tile writes its inverse, and raises `seen` to `known_amax`.
    """
    r = tl.program_id(0) * TR + tl.arange(0, TR)
    k = tl.program_id(1) * TK + tl.arange(0, TK)
    tile = _load(x, r, k, R, K, x_R, x_K, x, TR, TK, 0)
    if BY_ROW:
        at = r * scale_R
        exists = r < R
        is_first = tl.program_id(1) + tl.arange(0, 1) == 0
    elif IS_ONE:
        at = tl.arange(0, 1)
        exists = tl.full((1,), 1, tl.int1)
        is_first = tl.program_id(0) + tl.program_id(1) + tl.arange(0, 1) == 0
    else:
        row, column = tl.program_id(0) * TR, tl.program_id(1) * TK
        at = row // block_R * scale_R + column // block_K * scale_K + tl.arange(0, 1)
        exists = tl.full((1,), 1, tl.int1)
        is_first = row % block_R + column % block_K + tl.arange(0, 1) == 0
    if FROM_AMAX:
        bits = magnitude(tl.load(encode + at, mask=exists, other=0.0))
        _, factor, scale = rounding.scale_under(bits, AIM, POWER_OF_TWO)
        tl.store(block + at, scale, mask=exists & is_first)
    elif known_amax is not None:
        bits = magnitude(tl.load(known_amax + at))
        factor = tl.load(encode + at)
        scale = tl.where(bits < INFINITE, tl.math.div_rn(1.0, factor), float("nan"))
        tl.store(block + at, scale, mask=exists & is_first)
        if seen is not None:
            tl.atomic_max(
                seen + at, tl.where(bits < INFINITE, bits, 0), mask=exists & is_first, sem="relaxed"
            )
    else:
        factor = tl.load(encode + at, mask=exists, other=1.0)
        scale = tl.load(block + at, mask=exists, other=1.0)
    factor, scale = factor[:, None], scale[:, None]
    tile = tl.where(scale == scale, tile, 0.0)
    scaled = tl.math.div_rn(tile, tl.broadcast_to(factor, tile.shape)) if DIVIDES else tile * factor
    value = _rounded(scaled, key, offset, r, k, element_R, element_K, G, CODES, CONVERTS)
    if TIMES_SCALE and not CODES:
        value = value * scale
    _store(out, value, r, k, R, K, out_R, out_K)
    if other is not None:
        _store(other, value, r, k, R, K, other_R, other_K)


def tile_of(x_K: int, block_K: int = 1) -> tuple[int, int]:
    """Rows and contraction of a tile: long along contiguous memory, and a multiple of blocks."""
    return (32, 128) if x_K == 1 or block_K > 32 else (128, 32)
