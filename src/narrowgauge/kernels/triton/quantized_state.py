"""State tensors (`quantization.state.quantized_state`), read and written by kernels element by element.

The layout of a tensor is a tuple of constants, its CAST (`cast_constants`). Reading is exact; writing rounds
once, and computes the tensor's scale, if it has one, from the amax that another launch has found.
"""

from typing import Any

from narrowgauge.kernels.triton.arithmetic import narrow, wide
from narrowgauge.kernels.triton.launch import tl, triton
from narrowgauge.kernels.triton.rounding import code_of, to_grid, uniform_of, value_of
from narrowgauge.kernels.triton.scales import INFINITE, fp32_scale
from narrowgauge.quantization import Cast

# The positions in a CAST.
HOW, MAX, EMIN, M, ROUNDING, RANDOM_BITS, POWER_OF_TWO = (tl.constexpr(i) for i in range(7))
NOTHING = ("nothing", 0.0, 0, 0, "", 0, False)


def cast_constants(cast: Cast) -> tuple[Any, ...]:
    """A cast as constants for a kernel; the first names the layout.

    "plain" is a torch dtype; "scaled" fp16 under one scale; "codes" one-byte codes under one scale.
    """
    how = "plain" if not cast.is_scaled else "codes" if cast.element.bits == 8 else "scaled"
    e, rounding = cast.element, (cast.rounding, cast.random_bits, cast.power_of_two)
    return how, e.max, e.emin, e.mantissa_bits, *rounding


@triton.jit
def value(stored, scale, CAST: tl.constexpr):
    """The float32 values of what is stored, exactly."""
    if CAST[HOW] == "codes":
        # The bits of an fp32 whose exponent is too low by a constant; finite, as all stored codes are.
        code = stored.to(tl.int32)
        bits = ((code & 127) << (23 - CAST[M])) | ((code & 128) << 24)
        x = bits.to(tl.float32, bitcast=True) * 2.0 ** (126 + CAST[EMIN]) * scale
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
        if CAST[ROUNDING] == "stochastic":
            x = _random_bf16(x, uniform_of(key_0, key_1, at))
        x = narrow(x, DTYPE)
    else:
        finite = amax < INFINITE
        encode, scale = fp32_scale(
            tl.where(finite, amax, 0).to(tl.float32, bitcast=True), CAST[MAX], CAST[POWER_OF_TWO]
        )
        scale = tl.where(finite, scale, float("nan"))
        x = tl.where(finite, x, 0.0) * encode
        if CAST[HOW] == "scaled" and CAST[ROUNDING] == "nearest-even":
            x = narrow(tl.minimum(tl.maximum(x, -CAST[MAX]), CAST[MAX]), DTYPE)
        else:
            random = 0.0
            if CAST[ROUNDING] == "stochastic":
                random = uniform_of(key_0, key_1, at)
            rounding: tl.constexpr = CAST[ROUNDING]  # Triton 3.6 does not pass on a bare string
            k, e, sign = to_grid(x, random, CAST[MAX], CAST[EMIN], CAST[M], rounding, CAST[RANDOM_BITS])
            if CAST[HOW] == "scaled":
                x = narrow(value_of(k, e, sign, CAST[M], True), DTYPE)
            else:
                x = code_of(k, e, sign, CAST[EMIN], CAST[M], 8, False, True)
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
