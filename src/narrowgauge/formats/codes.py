"""Numbers on a format's grid to codes and back, and codes to the bytes that are stored.

A positive number v of the grid is k quanta, v = k * 2^(e - M), with e = max(floor(log2 v), emin). Its code
is ((e - emin) << M) + k: k counts the steps inside the binade, and for normal numbers its leading one
raises the exponent field from 0 to 1. The sign is the top bit; in two's complement the code is k itself.

Packing follows OCP MX and the hardware: FP4 two codes a byte, low nibble first; FP6 four codes in three
bytes, as a little-endian string of bits.
"""

import math
from functools import cache

import torch

from narrowgauge.formats.format import Format, Specials
from narrowgauge.formats.rounding import binade, exponent_bits, inverse_quantum, working_copy


def encode(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes of values that already lie on the grid of `fmt`.

    Args:
        values: floating tensor; every element is a number of `fmt`, or NaN or infinity where it has them.
        fmt: the format.

    Returns:
        uint8 tensor of the same shape (int32 for formats of more than 8 bits).
    """
    v = working_copy(values, fmt)
    exponent = exponent_bits(v, fmt)
    quanta = (v.abs() * inverse_quantum(exponent, fmt, v.dtype)).to(torch.int32)
    # Without subnormals (E8M0) code 0 is already a normal number: its leading one is not counted.
    codes = (binade(exponent, fmt, v.dtype) << fmt.mantissa_bits) + quanta - (0 if fmt.zero else 1)
    if fmt.infinity_code is not None:
        codes = torch.where(v.isinf(), fmt.infinity_code, codes)
    if fmt.twos_complement:
        codes = torch.where(v < 0, -codes, codes)
    elif fmt.signed:
        codes = codes | (v.signbit().to(torch.int32) << (fmt.bits - 1))
    if fmt.nan_code is not None:
        codes = torch.where(v.isnan(), fmt.nan_code, codes)
    return codes.to(torch.uint8 if fmt.bits <= 8 else torch.int32)


def decode_scalar(code: int, fmt: Format) -> float:
    """The number that a code stands for: the definition, read off the bits."""
    if code == fmt.nan_code:
        return math.nan
    if fmt.twos_complement:
        integer = code - (code >> (fmt.bits - 1) << fmt.bits)
        return math.ldexp(integer, fmt.emin - fmt.mantissa_bits)
    sign = -1.0 if fmt.signed and code >> (fmt.bits - 1) else 1.0
    body = code & (2 ** (fmt.bits - fmt.signed) - 1)
    exponent, mantissa = body >> fmt.mantissa_bits, body & (2**fmt.mantissa_bits - 1)
    if fmt.specials is Specials.IEEE and exponent == 2**fmt.exponent_bits - 1:
        return sign * math.inf if mantissa == 0 else math.nan
    if fmt.specials is Specials.NAN_ONLY and body == fmt.nan_code:
        return math.nan
    if exponent == 0 and fmt.zero:
        return sign * math.ldexp(mantissa, fmt.emin - fmt.mantissa_bits)
    return sign * math.ldexp(2**fmt.mantissa_bits + mantissa, exponent - fmt.bias - fmt.mantissa_bits)


@cache
def values_of(fmt: Format) -> tuple[float, ...]:
    """The number of every code of a format of 8 bits or fewer, in code order."""
    assert fmt.bits <= 8, fmt.name
    return tuple(decode_scalar(code, fmt) for code in range(2**fmt.bits))


def decode(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Float32 numbers of uint8 codes of a format of 8 bits or fewer."""
    table = torch.tensor(values_of(fmt), dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def pack(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The bytes as stored: uint8 codes of shape (..., K) to (..., ceil(K * bits / 8)).

    A last group that is not full is filled with code 0.
    """
    if fmt.bits == 8:
        return codes
    assert fmt.bits in (4, 6), fmt.name
    per_group, bytes_per_group = (2, 1) if fmt.bits == 4 else (4, 3)
    width = codes.shape[-1]
    codes = torch.nn.functional.pad(codes, (0, -width % per_group))
    groups = codes.unflatten(-1, (-1, per_group)).to(torch.int32)
    shifts = torch.arange(per_group, device=codes.device, dtype=torch.int32) * fmt.bits
    word = (groups << shifts).sum(-1)
    places = torch.arange(bytes_per_group, device=codes.device, dtype=torch.int32) * 8
    packed = (word.unsqueeze(-1) >> places & 255).to(torch.uint8).flatten(-2)
    return packed[..., : math.ceil(width * fmt.bits / 8)]


def unpack(packed: torch.Tensor, fmt: Format, width: int) -> torch.Tensor:
    """The inverse of `pack`: bytes of shape (..., B) to uint8 codes of shape (..., width)."""
    if fmt.bits == 8:
        return packed
    per_group, bytes_per_group = (2, 1) if fmt.bits == 4 else (4, 3)
    packed = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % bytes_per_group))
    groups = packed.unflatten(-1, (-1, bytes_per_group)).to(torch.int32)
    places = torch.arange(bytes_per_group, device=packed.device, dtype=torch.int32) * 8
    word = (groups << places).sum(-1)
    shifts = torch.arange(per_group, device=packed.device, dtype=torch.int32) * fmt.bits
    codes = (word.unsqueeze(-1) >> shifts & (2**fmt.bits - 1)).to(torch.uint8).flatten(-2)
    return codes[..., :width]
