"""Arithmetic in kernels: widening, rounding, the exponential, ordering by magnitude.

On a GPU these are hardware instructions. Triton's interpreter truncates fp32 to bf16 where a GPU rounds,
loses subnormal bf16, reads bf16 as integers in `tl.dot`, and has no libdevice, so there the same results are
computed in integers and with numpy.
"""

import os

from narrowgauge.kernels.triton.launch import libdevice, tl, triton

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
INFINITE = tl.constexpr(0x7F800000)  # the `magnitude` of an infinity; that of NaN is larger


@triton.jit
def wide(x):
    """Convert to fp32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round fp32 to a dtype, to nearest even; NaN stays NaN."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def fma(a, b, c):
    """a * b + c, rounded once.

    The interpreter would round twice. It computes in fp64 instead, where the product is exact, and makes the
    sum's last bit odd if it is inexact, so that rounding to fp32 is the only rounding (Boldo & Melquiond
    2008).
    """
    if INTERPRETED:
        product = a.to(tl.float64) * tl.cast(b, tl.float64)  # b may be a scalar
        c = c.to(tl.float64)
        total = product + c
        part = total - product
        rest = (product - (total - part)) + (c - part)
        bits = total.to(tl.int64, bitcast=True)
        cut = ((rest > 0) | (rest < 0)) & ((bits & 1) == 0)
        bits += tl.where(cut, tl.where((rest > 0) == (total > 0), 1, -1), 0)
        return bits.to(tl.float64, bitcast=True).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def exp(x):
    """The exponential that torch's kernels call, so that both give the same bits.

    `tl.exp` would first multiply by log2(e) in fp32, which loses accuracy where x is large.
    """
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def dot(a, b):
    """Multiply two matrices of one dtype with fp32 accumulation; fp32 operands are not reduced to tf32."""
    if INTERPRETED:
        return tl.dot(wide(a), wide(b))
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def magnitude(x):
    """|x| as the bits of an fp32: integers in the order of the magnitudes, with NaN above infinity."""
    return wide(x).to(tl.int32, bitcast=True) & 0x7FFFFFFF
