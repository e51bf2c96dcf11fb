"""Computes a block's scale from its amax, as functions for kernels; see `quantization.scales`.

An amax is passed as the bits of its float32, as int32: these are ordered as the values are, and every
infinity and NaN is at least INFINITE.
"""

from narrowgauge.kernels.triton.arithmetic import narrow, wide
from narrowgauge.kernels.triton.launch import tl, triton
from narrowgauge.kernels.triton.rounding import to_grid, value_of

INFINITE = tl.constexpr(0x7F800000)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def fp32_scale(amax, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The factors (encode, decode) = (max / amax, its inverse)."""
    zero = amax == 0
    encode = tl.minimum(
        tl.math.div_rn(tl.full(amax.shape, MAX, tl.float32), tl.where(zero, 1.0, amax)), FLOAT_MAX
    )
    if POWER_OF_TWO:
        encode = (encode.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    encode = tl.where(zero, 1.0, encode)
    return encode, tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), encode)


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
def nvfp4_scale(amax, S, INVERSE_LARGEST: tl.constexpr):
    """(encode, scale, E4M3 code of the scale) under the tensor's encoding scale S."""
    target = tl.minimum(amax * (S * INVERSE_LARGEST), 448.0)
    k, e, sign = to_grid(target, target, 448.0, -6, 3, "nearest-even", 24)
    scale = value_of(k, e, sign, 3, True)
    product = scale * tl.math.div_rn(1.0, S)
    zero = product == 0
    encode = tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), tl.where(zero, 1.0, product))
    return tl.where(zero, FLOAT_MAX, tl.minimum(encode, FLOAT_MAX)), scale, ((e >> 23) - 121 << 3) + k


@triton.jit
def rounded_scale(amax, MAX: tl.constexpr, S_MAX: tl.constexpr, S_EMIN: tl.constexpr, S_M: tl.constexpr):
    """(divisor, scale, its code) for scales that are the quotient amax / MAX, rounded to a format."""
    quotient = tl.math.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
    if S_EMIN < -100:  # bf16: its quanta have no inverse in fp32
        scale, code = wide(narrow(quotient, tl.bfloat16)), tl.zeros(amax.shape, tl.int32)
    else:
        k, e, sign = to_grid(quotient, quotient, S_MAX, S_EMIN, S_M, "nearest-even", 24)
        scale, code = value_of(k, e, sign, S_M, False), ((e >> 23) - (S_EMIN + 127) << S_M) + k
    zero = scale == 0
    code = tl.where(zero, (1 - S_EMIN) << S_M, code)  # that of 1
    return tl.where(zero, float("inf"), scale), tl.where(zero, 1.0, scale), code
