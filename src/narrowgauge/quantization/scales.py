"""From the largest magnitude of a block to the scale it is stored with.

Every function takes amax, the largest magnitude of each block as float32 (finite), and returns the factor
before rounding ("encode") and the factor that undoes it ("decode").

**fp32 scales** (TransformerEngine's current scaling): encode = fl(max / amax), decode = fl(1 / encode);
a block of zeros gets 1, an overflowing quotient the largest float. With `power_of_two` the encoding scale is
cut to its power of two, which never saturates and makes both factors exact.

**E8M0 scales** (OCP MX 1.0 section 6.3 and its successors) are powers of two, 2^(code - 127). With amax =
2^a * m, 1 <= m < 2, and the element format's largest number max = 2^emax * (2 - u):

    floor   a - emax                      OCP; amax may saturate when m > 2 - u
    ceil    a - emax, + 1 if m > 1        never saturates, wastes up to a binade
    even    a' - emax, where a' is a after amax is rounded to the element's mantissa bits   AMD
    rceil   ceil(log2(fl(amax * fl(1 / max))))        NVIDIA (cuBLAS, TransformerEngine); never saturates

Code 0 means 2^-127 and the block is quantized by exactly that; blocks of zeros get it.

**Scales that are rounded to a format** (bf16, e4m3, e5m3), without a tensor scale: the quotient itself,

    scale  = Q(fl(amax / max))        to nearest even, at most the format's largest number; 0 becomes 1

and an element is x / scale. A block whose scale would be 0 is all zeros.

**E4M3 scales under a tensor scale** (NVFP4; arXiv 2509.25149) in TransformerEngine's order of operations,
which decides the last bit. With S = fl(448 * 6 / amax_tensor), cut to the largest float and 1 if zero:

    scale  = e4m3(min(amax_block * fl(S * fl(1 / 6)), 448))
    encode = min(1 / fl(scale * fl(1 / S)), largest float)

`headroom` replaces 6 by 6 * headroom: rounding a scale to E4M3 may lower it by 1/17, so with 16/17 no
element is ever clipped.
"""

import torch

from narrowgauge.formats import Format, format, round_finite

FLOAT_MAX = torch.finfo(torch.float32).max
E4M3 = format("e4m3")


def _quotient(numerator: float, amax: torch.Tensor) -> torch.Tensor:
    """fl(numerator / amax), rounded once: torch computes `number / tensor` as `number * fl(1 / tensor)`."""
    return torch.full_like(amax, numerator) / amax


def fp32_scale(
    amax: torch.Tensor, element: Format, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors (encode, decode) of fp32 scales, float32 in the shape of `amax`."""
    encode = _quotient(element.max, amax).clamp(max=FLOAT_MAX)
    if power_of_two:  # amax is below 2^128, so the quotient is a normal number, its mantissa bits the low 23
        encode = (encode.view(torch.int32) & 0x7F800000).view(torch.float32)
    encode = torch.where(amax == 0, 1.0, encode)
    return encode, 1.0 / encode


def e8m0_code(amax: torch.Tensor, element: Format, rule: str) -> torch.Tensor:
    """The E8M0 codes (int32, 0 .. 254) that a scale rule gives to finite float32 `amax`."""
    if rule == "rceil":
        bits = (amax * (1 / element.max)).view(torch.int32)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        # A subnormal up to 2^-127 (mantissa 0x400000) is met exactly by code 0.
        up = (mantissa > 0) & (exponent < 254) & ~((exponent == 0) & (mantissa <= 0x400000))
        return exponent + up.to(torch.int32)
    is_subnormal = amax < 2.0**-126
    bits = torch.where(is_subnormal, amax * 2.0**24, amax).view(torch.int32)
    if rule == "even":
        bits = bits + (1 << (22 - element.fraction_bits))
    exponent = (bits >> 23) - 24 * is_subnormal.to(torch.int32)
    if rule == "ceil":
        exponent = exponent + ((bits & 0x7FFFFF) > 0).to(torch.int32)
    return (exponent - element.emax).clamp(0, 254)


def e8m0_scale(code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors (2^(127 - code), 2^(code - 127)) of int32 codes 0 .. 254: float32, exact."""
    return _power_of_two(254 - code), _power_of_two(code)


def _power_of_two(code: torch.Tensor) -> torch.Tensor:
    """2^(code - 127); code 0 is the subnormal 2^-127."""
    return torch.where(code == 0, 0x400000, code << 23).view(torch.float32)


def rounded_scale(amax: torch.Tensor, element: Format, scale: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """The divisor of each block's elements (infinite where all become zeros), and the block's scale."""
    quotient = amax / torch.full_like(amax, element.max)
    block = round_finite(quotient.double(), scale).float()
    return torch.where(block == 0, torch.inf, block), torch.where(block == 0, 1.0, block)


def nvfp4_tensor_scale(
    amax: torch.Tensor, element: Format, headroom: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The encoding scale S of a tensor and the factor that undoes it, 0-dim float32."""
    largest = E4M3.max * element.max * headroom
    S = _quotient(largest, amax).clamp(max=FLOAT_MAX)
    unusable = (amax == 0) | (S == 0)
    S = torch.where(unusable, 1.0, S)
    exact = ~unusable & (S < FLOAT_MAX)
    return S, torch.where(exact, amax / torch.full_like(amax, largest), 1.0 / S)


def nvfp4_block_scale(
    amax: torch.Tensor, S: torch.Tensor, element: Format, headroom: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor for the elements of each block, and the E4M3 block scale as float32."""
    scale = round_finite((amax * (S * (1 / (element.max * headroom)))).clamp(max=E4M3.max), E4M3)
    encode = (1.0 / (scale * (1.0 / S))).clamp(max=FLOAT_MAX)
    return encode, scale
