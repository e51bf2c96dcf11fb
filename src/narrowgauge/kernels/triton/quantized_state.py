"""State tensors (`quantization.state.quantized_state`), read and written by kernels element by element.

The layout of a tensor is a tuple of constants, its CAST (`cast_constants`), which begins with a grid. Reading
is exact; writing rounds once, and computes the tensor's scale, if it has one, from the amax that another
launch has found.
"""

from typing import Any

from narrowgauge.kernels.triton import rounding
from narrowgauge.kernels.triton.arithmetic import INFINITE, narrow, wide
from narrowgauge.kernels.triton.launch import tl, triton
from narrowgauge.quantization import Cast

HOW, POWER_OF_TWO = tl.constexpr(8), tl.constexpr(9)  # the positions in a CAST behind those of its grid
NOTHING = (0.0, 0, 0, 0, False, False, "", 0, "nothing", False)


def cast_constants(cast: Cast) -> tuple[Any, ...]:
    """A cast as constants for a kernel: its grid, and HOW a tensor lies in memory.

    "plain" is a torch dtype; "scaled" fp16 under one scale; "codes" one-byte codes under one scale.
    """
    how = "plain" if not cast.is_scaled else "codes" if cast.element.bits == 8 else "scaled"
    return *rounding.grid_of(cast.element, cast.rounding, cast.random_bits), how, cast.power_of_two


@triton.jit
def value(stored, scale, CAST: tl.constexpr):
    """The float32 values of what is stored, exactly."""
    if CAST[HOW] == "codes":
        # The bits of an fp32 whose exponent is too low by a constant; finite, as all stored codes are.
        code = stored.to(tl.int32)
        bits = ((code & 127) << (23 - CAST[rounding.M])) | ((code & 128) << 24)
        x = bits.to(tl.float32, bitcast=True) * 2.0 ** (126 + CAST[rounding.EMIN]) * scale
    elif CAST[HOW] == "scaled":
        x = wide(stored) * scale
    else:
        x = wide(stored)
    return x


@triton.jit
def read(values, extra, at, inside, CAST: tl.constexpr):
    """The values as float32, exactly; `extra` has the scale."""
    scale = 1.0 if CAST[HOW] == "plain" else tl.load(extra)
    return value(tl.load(values + at, inside, 0), scale, CAST)


@triton.jit
def _random_bf16(x, random):
    """Round fp32 values to bf16's grid, up where the truncated part exceeds `random`."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = bits < INFINITE
    bits = tl.minimum(bits, 0x7F7F0000)
    cut = bits & 0xFFFF
    bits += tl.where(cut.to(tl.float32) * (1.0 / 65536) > random, 0x10000, 0) - cut
    value = (bits | (x.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)
    return tl.where(finite, value, x)


@triton.jit
def rounded(x, amax, key_0, key_1, at, DTYPE: tl.constexpr, CAST: tl.constexpr):
    """(what is stored of float32 values, its scale), from the bits of their amax."""
    scale = 1.0
    if CAST[HOW] == "plain":
        if CAST[rounding.ROUNDING] == "stochastic":
            x = _random_bf16(x, rounding.uniform_of(key_0, key_1, at))
        x = narrow(x, DTYPE)
    else:
        finite, encode, scale = rounding.scale_under(amax, CAST[rounding.MAX], CAST[POWER_OF_TWO])
        x = tl.where(finite, x, 0.0) * encode
        if CAST[HOW] == "scaled" and CAST[rounding.ROUNDING] == "nearest-even":
            x = narrow(tl.minimum(tl.maximum(x, -CAST[rounding.MAX]), CAST[rounding.MAX]), DTYPE)
        else:
            random = 0.0
            if CAST[rounding.ROUNDING] == "stochastic":
                random = rounding.uniform_of(key_0, key_1, at)
            k, e, sign = rounding.to_grid(x, random, CAST)
            if CAST[HOW] == "scaled":
                x = narrow(rounding.value_of(k, e, sign, CAST), DTYPE)
            else:
                x = rounding.code_of(k, e, sign, CAST)
    return x, scale


@triton.jit
def write(x, values, extra, amax, key_0, key_1, at, inside, CAST: tl.constexpr):
    """Store float32 values, each rounded once, and their scale; returns the values that are stored."""
    stored, scale = rounded(x, amax, key_0, key_1, at, values.dtype.element_ty, CAST)
    tl.store(values + at, stored, inside)
    if CAST[HOW] != "plain":
        tl.store(extra, scale, tl.program_id(0) == 0)
    return value(stored, scale, CAST)


@triton.jit
def copy_scale(to, extra, CAST: tl.constexpr):
    """Copy a scale, if there is one, as the bits of its fp32."""
    if CAST[HOW] == "codes" or CAST[HOW] == "scaled":
        tl.store(to, tl.load(extra).to(tl.int32, bitcast=True))
