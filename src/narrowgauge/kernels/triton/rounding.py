"""Rounding to a grid, codes, random bits of an element, and scales, as functions for kernels.

One is a kernel itself: random signs in one launch, instead of twenty plain operations.

**A grid** is a tuple of constants, G (`grid_of`). The arithmetic is that of `formats.rounding`,
`formats.codes` and `formats.counter_rng`, except that k, the integer part of an element over its quantum, is
kept as an integer. The element follows from k and its exponent field e (at least that of emin):

    value = sign * k * 2^(e - M)             code = sign bit, ((e - emin) << M) + k

for both normal and subnormal values; a k that rounds up to 2^(M + 1) carries into the exponent.

**Scales** of a block follow from its amax as in `quantization.scales`. An amax is passed as the bits of its
float32, as int32: these are ordered as the values are, and every infinity and NaN is at least INFINITE.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from narrowgauge.formats import Format, RandomStream
from narrowgauge.kernels.dispatch import converts_to_fp8
from narrowgauge.kernels.triton.arithmetic import INFINITE, narrow, wide
from narrowgauge.kernels.triton.launch import launch, next_power_of_2, tl, triton

FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
# Positions in a grid, read as `at.MAX`: at each launch Triton compares globals, but no module's attributes.
at = sys.modules[__name__]
MAX, EMIN, M, BITS, TWOS, MINUS_ZERO, ROUNDING, RANDOM_BITS = (tl.constexpr(i) for i in range(8))


def grid_of(fmt: Format, rounding: str = "nearest-even", random_bits: int = 24) -> tuple[Any, ...]:
    """The grid of a format: its facts (TWOS: two's complement; MINUS_ZERO has a code), and how it rounds."""
    facts = fmt.max, fmt.emin, fmt.mantissa_bits, fmt.bits, fmt.twos_complement, fmt.has_negative_zero
    return *facts, rounding, random_bits


def is_converted(element: Format, rounding: str, device: torch.device) -> bool:
    """Whether a GPU instruction rounds the elements (`to_fp8`)."""
    return element.name in ("e4m3", "e5m2") and rounding == "nearest-even" and converts_to_fp8(device)


def stream_tensors(random: object, like: Tensor) -> tuple[Tensor, Tensor]:
    """The key of a stream and the index of its first element, as tensors; `like` in place of no stream."""
    if not isinstance(random, RandomStream):
        return like, like
    offset = random.offset
    if not isinstance(offset, Tensor):
        offset = torch.full((), offset, dtype=torch.int64, device=like.device)
    return random.key, offset


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * tl.full((), 0x21F0AAAD, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0xD35A2D97, tl.uint32)
    return x ^ (x >> 15)


@triton.jit
def uniform(key, index):
    """Values in [0, 1) for the elements `index` (int64) of a stream whose key words are at `key`."""
    return uniform_of(tl.load(key), tl.load(key + 1), index)


@triton.jit
def uniform_of(key_0, key_1, index):
    """`uniform` for key words that are already loaded, int32."""
    return (bits_of(key_0, key_1, index) >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def bits_of(key_0, key_1, index):
    """32 random bits for the elements `index` (int64), uint32."""
    k0, k1 = key_0.to(tl.uint32, bitcast=True), key_1.to(tl.uint32, bitcast=True)
    high = (index >> 32).to(tl.uint32) * tl.full((), 0x9E3779B9, tl.uint32)
    return _mix(_mix((index & 0xFFFFFFFF).to(tl.uint32) ^ k0) ^ high ^ k1)


@triton.jit
def to_grid(x, random, G: tl.constexpr):
    """(k, exponent field, sign bit) of finite float32 values; `random` is for "stochastic" only."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    magnitude = tl.minimum(tl.abs(x), G[at.MAX])
    e = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, (G[at.EMIN] + 127) << 23)
    t = magnitude * (0x7F000000 - e + (G[at.M] << 23)).to(tl.float32, bitcast=True)  # 1 / quantum, exact
    k = t.to(tl.int32)
    fraction = t - k.to(tl.float32)
    if G[at.ROUNDING] == "nearest-even":
        code = k if G[at.M] else (e >> 23) - (G[at.EMIN] + 127) + k  # without mantissa bits, of each binade
        up = (fraction > 0.5) | ((fraction == 0.5) & ((code & 1) == 1))
        k += up.to(tl.int32)
    elif G[at.ROUNDING] == "half-away":
        k += (fraction >= 0.5).to(tl.int32)
    elif G[at.ROUNDING] == "stochastic":
        if G[at.RANDOM_BITS] == 24:
            k += (fraction > random).to(tl.int32)
        else:
            r = (random * 2.0 ** G[at.RANDOM_BITS]).to(tl.int32).to(tl.float32)
            k += (fraction >= 1.0 - r * 2.0 ** -G[at.RANDOM_BITS]).to(tl.int32)
    return k, e, sign


@triton.jit
def value_of(k, e, sign, G: tl.constexpr):
    """The float32 values on the grid."""
    value = k.to(tl.float32) * (e - (G[at.M] << 23)).to(tl.float32, bitcast=True)
    if not G[at.MINUS_ZERO]:
        sign = tl.where(k == 0, 0, sign)
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def code_of(k, e, sign, G: tl.constexpr):
    """Their codes, uint8."""
    if G[at.TWOS]:
        code = tl.where(sign != 0, -k, k) & ((1 << G[at.BITS]) - 1)
    else:
        minus = sign != 0
        if not G[at.MINUS_ZERO]:
            minus = minus & (k != 0)
        code = ((e >> 23) - (G[at.EMIN] + 127) << G[at.M]) + k | tl.where(minus, 1 << (G[at.BITS] - 1), 0)
    return code.to(tl.uint8)


@triton.jit
def to_fp8(x, G: tl.constexpr):
    """Round finite float32 values to FP8, ties to even, with a GPU instruction.

    `cvt.rn.satfinite.e4m3x2.f32` and `.e5m2x2.f32` (PTX ISA, cvt) round as `to_grid` does by "nearest-even",
    including subnormals, carries and the sign of zero; values larger than MAX become MAX. One instruction
    produces two codes; `to_grid` and `code_of` take forty for each.
    """
    x = tl.minimum(tl.maximum(x, -G[at.MAX]), G[at.MAX])  # Triton does not guarantee saturation
    return x.to(tl.float8e4nv if G[at.M] == 3 else tl.float8e5)


@triton.jit
def fp32_scale(amax, AIM: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The factors (encode, decode) = (AIM / amax, its inverse)."""
    zero = amax == 0
    encode = tl.minimum(
        tl.math.div_rn(tl.full(amax.shape, AIM, tl.float32), tl.where(zero, 1.0, amax)), FLOAT_MAX
    )
    if POWER_OF_TWO:
        encode = (encode.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    encode = tl.where(zero, 1.0, encode)
    return encode, tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), encode)


@triton.jit
def scale_under(bits, AIM: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """(whether an amax is finite, encode, decode or NaN), from its bits."""
    finite = bits < INFINITE
    amax = tl.where(finite, bits, 0).to(tl.float32, bitcast=True)
    encode, decode = fp32_scale(amax, AIM, POWER_OF_TWO)
    return finite, encode, tl.where(finite, decode, float("nan"))


@triton.jit
def e8m0_code(
    amax, RULE: tl.constexpr, INVERSE_MAX: tl.constexpr, EMAX: tl.constexpr, FRACTION: tl.constexpr
):
    """E8M0 codes, int32, 0 to 254."""
    if RULE == "rceil":
        bits = (amax * INVERSE_MAX).to(tl.int32, bitcast=True)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        up = (mantissa > 0) & (exponent < 254) & ((exponent != 0) | (mantissa > 0x400000))
        code = exponent + up.to(tl.int32)
    else:
        is_subnormal = amax < 2.0**-126
        bits = tl.where(is_subnormal, amax * 16777216.0, amax).to(tl.int32, bitcast=True)
        if RULE == "even":
            bits += 1 << (22 - FRACTION)
        exponent = (bits >> 23) - tl.where(is_subnormal, 24, 0)
        if RULE == "ceil":
            exponent += ((bits & 0x7FFFFF) > 0).to(tl.int32)
        code = tl.minimum(tl.maximum(exponent - EMAX, 0), 254)
    return code


@triton.jit
def power_of_two(code):
    """2^(code - 127)."""
    return tl.where(code == 0, 0x400000, code << 23).to(tl.float32, bitcast=True)


@triton.jit
def nvfp4_tensor_scale(over, LARGEST: tl.constexpr):
    """(encoding scale S of a tensor, the factor that undoes it) from its largest finite magnitude."""
    zero = over == 0
    S = tl.minimum(tl.math.div_rn(LARGEST, tl.where(zero, 1.0, over)), FLOAT_MAX)
    unusable = zero | (S == 0)
    S = tl.where(unusable, 1.0, S)
    is_exact = (unusable == 0) & (S < FLOAT_MAX)
    return S, tl.where(is_exact, tl.math.div_rn(over, LARGEST), tl.math.div_rn(1.0, S))


@triton.jit
def nvfp4_scale(amax, outer, INVERSE_LARGEST: tl.constexpr, S: tl.constexpr):
    """(encode, scale, its code on the grid S of E4M3) under the tensor's encoding scale."""
    target = amax * (outer * INVERSE_LARGEST)
    k, e, sign = to_grid(target, target, S)
    scale = value_of(k, e, sign, S)
    product = scale * tl.math.div_rn(1.0, outer)
    zero = product == 0
    encode = tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), tl.where(zero, 1.0, product))
    code = ((e >> 23) - (S[at.EMIN] + 127) << S[at.M]) + k
    return tl.where(zero, FLOAT_MAX, tl.minimum(encode, FLOAT_MAX)), scale, code


@triton.jit
def rounded_scale(amax, AIM: tl.constexpr, S: tl.constexpr):
    """(divisor, scale, its code) for scales that are the quotient amax / AIM, rounded to the grid S."""
    quotient = tl.math.div_rn(amax, tl.full(amax.shape, AIM, tl.float32))
    if S[at.EMIN] < -100:  # bf16: its quanta have no inverse in fp32
        scale, code = wide(narrow(quotient, tl.bfloat16)), tl.zeros(amax.shape, tl.int32)
    else:
        k, e, sign = to_grid(quotient, quotient, S)
        scale, code = value_of(k, e, sign, S), ((e >> 23) - (S[at.EMIN] + 127) << S[at.M]) + k
    zero = scale == 0
    code = tl.where(zero, (1 - S[at.EMIN]) << S[at.M], code)  # that of 1
    return tl.where(zero, float("inf"), scale), tl.where(zero, 1.0, scale), code


@triton.jit
def random_signs(key_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """1 - 2 (bit 0 of the random bits of each element)."""
    at = tl.arange(0, BLOCK)
    bits = bits_of(tl.load(key_ptr), tl.load(key_ptr + 1), at.to(tl.int64))
    signs = 1.0 - 2.0 * (bits & 1).to(tl.float32)
    tl.store(out_ptr + at, narrow(signs, out_ptr.dtype.element_ty), at < size)


def launch_signs(key: Tensor, size: int) -> Tensor:
    """The signs of `size` elements of a stream whose two int32 words are `key`: +1 or -1, in bf16."""
    signs = torch.empty(size, dtype=torch.bfloat16, device=key.device)
    block = max(16, next_power_of_2(size))
    launch(
        random_signs, (1,), key, signs, size,
        writes="out_ptr", BLOCK=block, num_warps=1,
    )  # fmt: skip
    return signs
