"""Rounding to a format's grid, its codes, and the random bits of an element, as functions for kernels.

One is a kernel itself: random signs in one launch, instead of twenty plain operations.
The arithmetic is that of `formats.rounding`, `formats.codes` and `formats.counter_rng`, except that k, the
integer part of an element over its quantum, is kept as an integer. The element follows from k and its
exponent field e (at least that of emin):

    value = sign * k * 2^(e - M)             code = sign bit, ((e - emin) << M) + k

for both normal and subnormal values; a k that rounds up to 2^(M + 1) carries into the exponent.

MAX, EMIN, M, TWOS (two's complement) and MINUS_ZERO (it has a code) are the facts of a format (`facts`).
"""

from typing import Any

import torch
from torch import Tensor

from narrowgauge.formats import Format, RandomStream, format
from narrowgauge.kernels.dispatch import converts_to_fp8
from narrowgauge.kernels.triton.arithmetic import narrow
from narrowgauge.kernels.triton.launch import launch, next_power_of_2, tl, triton


def facts(fmt: Format) -> dict[str, Any]:
    """A format as kernel constants."""
    return {
        "MAX": fmt.max,
        "EMIN": fmt.emin,
        "M": fmt.mantissa_bits,
        "BITS": fmt.bits,
        "TWOS": fmt.twos_complement,
        "MINUS_ZERO": fmt.has_negative_zero,
    }


def facts_of_scale(name: str) -> dict[str, Any]:
    """The format of scales as kernel constants; S_NAN is 0 if scales have no one-byte codes."""
    fmt = format(name)
    nan_code = fmt.nan_code if fmt.bits == 8 else 0
    return {"S_MAX": fmt.max, "S_EMIN": fmt.emin, "S_M": fmt.mantissa_bits, "S_NAN": nan_code}


def is_converted(element: Format, rounding: str, device: torch.device) -> bool:
    """Whether a GPU instruction rounds the elements (`to_fp8`)."""
    is_nearest = rounding == "nearest-even"
    return element.name in ("e4m3", "e5m2") and is_nearest and converts_to_fp8(device)


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
def to_grid(
    x, random, MAX: tl.constexpr, EMIN: tl.constexpr, M: tl.constexpr,
    ROUNDING: tl.constexpr, RANDOM_BITS: tl.constexpr,
):  # fmt: skip
    """(k, exponent field, sign bit) of finite float32 values; `random` is for "stochastic" only."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    magnitude = tl.minimum(tl.abs(x), MAX)
    e = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, (EMIN + 127) << 23)
    t = magnitude * (0x7F000000 - e + (M << 23)).to(tl.float32, bitcast=True)  # 1 / quantum, exact
    k = t.to(tl.int32)
    fraction = t - k.to(tl.float32)
    if ROUNDING == "nearest-even":
        code = k if M else (e >> 23) - (EMIN + 127) + k  # without mantissa bits, of each binade
        up = (fraction > 0.5) | ((fraction == 0.5) & ((code & 1) == 1))
        k += up.to(tl.int32)
    elif ROUNDING == "half-away":
        k += (fraction >= 0.5).to(tl.int32)
    elif ROUNDING == "stochastic":
        if RANDOM_BITS == 24:
            k += (fraction > random).to(tl.int32)
        else:
            r = (random * 2.0**RANDOM_BITS).to(tl.int32).to(tl.float32)
            k += (fraction >= 1.0 - r * 2.0**-RANDOM_BITS).to(tl.int32)
    return k, e, sign


@triton.jit
def value_of(k, e, sign, M: tl.constexpr, MINUS_ZERO: tl.constexpr):
    """The float32 values on the grid."""
    value = k.to(tl.float32) * (e - (M << 23)).to(tl.float32, bitcast=True)
    if not MINUS_ZERO:
        sign = tl.where(k == 0, 0, sign)
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def code_of(
    k, e, sign, EMIN: tl.constexpr, M: tl.constexpr,
    BITS: tl.constexpr, TWOS: tl.constexpr, MINUS_ZERO: tl.constexpr,
):  # fmt: skip
    """Their codes, uint8."""
    if TWOS:
        code = tl.where(sign != 0, -k, k) & ((1 << BITS) - 1)
    else:
        minus = sign != 0
        if not MINUS_ZERO:
            minus = minus & (k != 0)
        code = ((e >> 23) - (EMIN + 127) << M) + k | tl.where(minus, 1 << (BITS - 1), 0)
    return code.to(tl.uint8)


@triton.jit
def to_fp8(x, MAX: tl.constexpr, M: tl.constexpr):
    """Round finite float32 values to FP8, ties to even, with a GPU instruction.

    `cvt.rn.satfinite.e4m3x2.f32` and `.e5m2x2.f32` (PTX ISA, cvt) round as `to_grid` does by "nearest-even",
    including subnormals, carries and the sign of zero; values larger than MAX become MAX. One instruction
    produces two codes; `to_grid` and `code_of` take forty for each.
    """
    x = tl.minimum(tl.maximum(x, -MAX), MAX)  # Triton does not guarantee saturation
    return x.to(tl.float8e4nv if M == 3 else tl.float8e5)


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
