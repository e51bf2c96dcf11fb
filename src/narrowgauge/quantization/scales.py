"""Computes a block's scale from its amax.

Every function takes the amax of each block as float32 (finite), and returns the factor applied before
rounding ("encode") and the factor that undoes it ("decode").

**fp32 scales** (TransformerEngine's current scaling): encode = fl(max / amax), decode = fl(1 / encode);
a block of zeros gets 1, an overflowing quotient the largest float. With `power_of_two` the encoding scale is
rounded down to a power of two, which never saturates and makes both factors exact.

**E8M0 scales** (OCP MX 1.0 section 6.3 and its successors) are powers of two, 2^(code - 127). With amax =
2^a * m, 1 <= m < 2, and the element format's largest value max = 2^emax * (2 - u):

    floor   a - emax                      OCP; amax may saturate when m > 2 - u
    ceil    a - emax, + 1 if m > 1        never saturates, wastes up to a binade
    even    a' - emax, where a' is a after amax is rounded to the element's mantissa bits   AMD
    rceil   ceil(log2(fl(amax * fl(1 / max))))        NVIDIA (cuBLAS, TransformerEngine); never saturates

Code 0 means 2^-127 and the block is quantized by exactly that; blocks of zeros get it.

`headroom` h replaces max by h * max in every rule that contains it (all but floor, ceil and even).

**Scales rounded to a format** (bf16, e4m3, e5m3) are the quotient itself,

    scale  = Q(fl(amax / max))

rounded by `scale_rounding`, at most the format's largest value; an element is fl(x / scale). Under a tensor
scale, with g the amax of the tensor or of the row, and T the `scale_target`,

    scale  = Q(fl(amax * T / g))      tensor_scale = fl(g / fl(T * max))

and an element is fl(x / fl(scale * tensor_scale)). A scale that rounds to 0 becomes 1, or stays 0, and its
block is all zeros; or it becomes the smallest positive value (`zero_scale`).

**E4M3 scales under a tensor scale** (NVFP4; arXiv 2509.25149) follow TransformerEngine's order of operations,
which decides the last bit. With S = fl(T * 6 / g), at most the largest float and 1 if zero:

    scale  = e4m3(min(amax * fl(S * fl(1 / 6)), 448))
    encode = min(1 / fl(scale * fl(1 / S)), largest float)

Here a scale that rounds to 0 stays 0 unless `zero_scale` specifies otherwise. With a headroom of 16/17 no
element is ever clipped, because rounding a scale to E4M3 lowers it by at most 1/17.

With `candidates`, each magnitude c that a block's amax may be mapped to gives a scale that is larger by max /
c before it is rounded: Q(fl(q * fl(max / c))) with q the quotient above, which for NVFP4 is fl(fl(amax / 6) *
S). The one with the least error is chosen (`passes.in_torch.best`; arXiv 2512.02010).

`correct = "projection"` (MS-EDEN; arXiv 2601.22813) rounds a scale twice. Elements q are those under the
nearest scale s. Then, over a Hadamard group, with t the values in units of their block's scale,

    S = fl(sum t^2 / sum t q)         1 if the denominator is 0       scale = Q(fl(s * S)) by `scale_rounding`
"""

from typing import NamedTuple

import torch

from narrowgauge.formats import Format, Randomness, format, round_finite
from narrowgauge.quantization.cast import Cast

FLOAT_MAX = torch.finfo(torch.float32).max


class Scales(NamedTuple):
    """Scales of blocks, float32, inner dimensions kept with size 1.

    `tensor` is None for 1, 0-dim, or one per row or block, with as many dimensions as the others.
    """

    encode: torch.Tensor  # an element is multiplied by it before rounding; divided by it, if `divides`
    block: torch.Tensor  # undoes it, without `tensor`
    tensor: torch.Tensor | None
    finite: torch.Tensor  # bool: whether the block holds only finite values
    divides: bool = False


def scales_from(
    amax: torch.Tensor,
    cast: Cast,
    given: torch.Tensor | None = None,
    over: torch.Tensor | None = None,
    random: Randomness = None,
    candidate: float = 0.0,
) -> Scales:
    """The scales of blocks with known amaxes: float32, NaN or infinite where a block is not finite.

    Args:
        amax: The amaxes.
        cast: The cast.
        given: An encoding scale known in advance.
        over: The largest finite magnitude of the tensor or of each row, for casts with an outer scale.
        random: Random bits for scales that are rounded stochastically, one per block.
        candidate: The magnitude that a block's amax is mapped to; 0 for the largest element.
    """
    finite = amax.isfinite()
    amax = torch.where(finite, amax, 0.0)
    tensor_scale = None
    if given is not None:
        encode, block = given.expand_as(amax), (1.0 / given).expand_as(amax)
    elif cast.scale == "fp32":
        encode, block = fp32_scale(amax, cast.element, cast.power_of_two, cast.headroom)
    elif cast.scale == "e8m0":
        assert cast.scale_rule is not None
        code = e8m0_code(amax, cast.element, cast.scale_rule, cast.headroom)
        encode, block = _power_of_two(254 - code), _power_of_two(code)
    elif cast.has_nvfp4_scales:
        assert over is not None
        S, tensor_scale = nvfp4_tensor_scale(over, cast)
        encode, block = nvfp4_block_scale(amax, S, cast, random, candidate)
    else:
        encode, block, tensor_scale = rounded_scale(amax, over, cast, random, candidate)
    divides = cast.has_rounded_scales and given is None
    return Scales(encode, torch.where(finite, block, torch.nan), tensor_scale, finite, divides)


def _quotient(numerator: float, amax: torch.Tensor) -> torch.Tensor:
    """fl(numerator / amax), rounded once; torch computes `number / tensor` as `number * fl(1 / tensor)`."""
    return torch.full_like(amax, numerator) / amax


def fp32_scale(
    amax: torch.Tensor, element: Format, power_of_two: bool = False, headroom: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors (encode, decode) of fp32 scales, float32 in the shape of `amax`."""
    encode = _quotient(element.max * headroom, amax).clamp(max=FLOAT_MAX)
    if power_of_two:  # amax is below 2^128, so the quotient is a normal number, its mantissa bits the low 23
        encode = (encode.view(torch.int32) & 0x7F800000).view(torch.float32)
    encode = torch.where(amax == 0, 1.0, encode)
    return encode, 1.0 / encode


def e8m0_code(amax: torch.Tensor, element: Format, rule: str, headroom: float = 1.0) -> torch.Tensor:
    """The E8M0 codes (int32, 0 .. 254) by a scale rule, for finite float32 `amax`."""
    if rule == "rceil":
        bits = (amax * (1 / (element.max * headroom))).view(torch.int32)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        # Code 0 is exact for a subnormal up to 2^-127 (mantissa 0x400000).
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


def _power_of_two(code: torch.Tensor) -> torch.Tensor:
    """2^(code - 127) of int32 codes 0 .. 254: float32, exact; code 0 is the subnormal 2^-127."""
    return torch.where(code == 0, 0x400000, code << 23).view(torch.float32)


def rounded_scale(
    amax: torch.Tensor, over: torch.Tensor | None, cast: Cast, random: Randomness, candidate: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Scales that are quotients, rounded to the cast's scale format; the arguments of `scales_from`.

    Returns:
        The divisor of each block's elements (infinite where all become zeros), its scale, and the outer scale
        in the shape of `over`.
    """
    factor = cast.element.max / candidate if candidate else 1.0
    if over is None:
        block, is_zeros = rounded(amax / torch.full_like(amax, cast.aim) * factor, cast, random)
        return torch.where(is_zeros, torch.inf, block), block, None
    quotient = (amax.double() * cast.target / over.double()).float()  # rounded once, and never overflows
    block, is_zeros = rounded(torch.where(over == 0, 0.0, quotient) * factor, cast, random)
    above = torch.where(over == 0, 1.0, over / torch.full_like(over, cast.target * cast.aim))
    divisor = block * above
    return torch.where(is_zeros | (divisor == 0), torch.inf, divisor), block, above


def nvfp4_tensor_scale(over: torch.Tensor, cast: Cast) -> tuple[torch.Tensor, torch.Tensor]:
    """The encoding scale S of a tensor or of its rows, and the factor that undoes it, in float32."""
    largest = cast.target * cast.element.max * cast.headroom
    S = _quotient(largest, over).clamp(max=FLOAT_MAX)
    unusable = (over == 0) | (S == 0)
    S = torch.where(unusable, 1.0, S)
    exact = ~unusable & (S < FLOAT_MAX)
    return S, torch.where(exact, over / torch.full_like(over, largest), 1.0 / S)


def nvfp4_block_scale(
    amax: torch.Tensor, S: torch.Tensor, cast: Cast, random: Randomness = None, candidate: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor for the elements of each block, and the E4M3 block scale as float32."""
    if candidate:
        quotient = amax / torch.full_like(amax, cast.aim) * S * (cast.element.max / candidate)
    else:
        quotient = amax * (S * (1 / cast.aim))
    scale, is_zeros = rounded(quotient, cast, random)
    encode = (1.0 / (scale * (1.0 / S))).clamp(max=FLOAT_MAX)
    return (torch.where(is_zeros, 0.0, encode) if cast.zero_rule == "one" else encode), scale


def rounded(
    quotient: torch.Tensor, cast: Cast, random: Randomness = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales on the grid of the cast's scale format, whether the block is all zeros)."""
    fmt, rule = format(cast.scale), cast.zero_rule
    wide = quotient.double() if fmt.exponent_bits == 8 else quotient
    scale = round_finite(wide, fmt, cast.scale_rounding, random).float()
    is_zero = scale == 0
    if rule == "zero":
        return scale, is_zero
    instead = 1.0 if rule == "one" else fmt.smallest_subnormal
    return torch.where(is_zero, instead, scale), is_zero & (rule == "one")


def rounded_sqrt(x: torch.Tensor) -> torch.Tensor:
    """The square roots of a float32 tensor, rounded once, as IEEE 754 and GPUs have them.

    Torch takes those of a CPU from MKL, whose last bit is off in a fifth of all values on AMD's processors.
    """
    return x.double().sqrt().float() if x.is_cpu else x.sqrt()
