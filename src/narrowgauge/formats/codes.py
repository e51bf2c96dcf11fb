"""Encodes values on a format's grid as codes, decodes them, and packs codes into bytes.

A float32 is an exponent field over 23 mantissa bits; a narrow code is the same over M. Multiplying a value by
2^(b - 127) gives it the exponent field of its code in a format of bias b. The code is then the upper bits of
the float32; the lower bits are zero because the value lies on the grid. Subnormals of the format become
float32 subnormals and need no special case. Decoding runs the same steps backwards. The sign is the top bit;
in two's complement (INT8, whose exponent field is empty) the code is a signed integer.

Packing follows OCP MX and the hardware: two FP4 codes per byte, low nibble first; four FP6 codes in three
bytes, as a little-endian bit string.
"""

import math

import torch

from narrowgauge.formats.format import Format, Specials
from narrowgauge.formats.rounding import holds, round_to
from narrowgauge.formats.table import torch_dtype
from narrowgauge.system.devices import is_gpu
from narrowgauge.system.errors import UserError

_BIAS, _MANTISSA = 127, 23  # of float32
_CHUNK = 2**17  # elements; with temporaries, roughly the size of a core's L2 cache


def encode(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The codes of a floating tensor rounded by `round_to`: uint8, int32 for formats wider than 8 bits.

    Raises:
        UserError: Not a dense floating tensor; an element becomes NaN, for which the format has no code.
    """
    rounded = round_to(values, fmt)
    if fmt.nan_code is None and not rounded.is_meta and bool(rounded.isnan().any()):
        raise UserError(f"{fmt.name} has no code for NaN, infinity or values below its range; remove them")
    return codes_of(rounded, fmt)


def codes_of(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`encode` for values that already lie on the grid, or are NaN or infinity where the format has them."""
    v = values.to(torch.float32)
    codes = encode_finite_(v.clone(), fmt)
    if fmt.infinity_code is not None:
        sign = v.signbit().to(codes.dtype) << (fmt.bits - 1)
        codes = torch.where(v.isinf(), fmt.infinity_code | sign, codes)
    if fmt.nan_code is not None:
        codes = torch.where(v.isnan(), fmt.nan_code, codes)
    return codes


def encode_finite_(v: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`codes_of` for a float32 tensor of finite values; overwrites it."""
    bits = _times_power_(v, fmt.bias - _BIAS).view(torch.int32)
    sign = bits >> 31  # 0 or -1
    codes = bits.bitwise_and_(0x7FFFFFFF).bitwise_right_shift_(_MANTISSA - fmt.mantissa_bits)
    if fmt.twos_complement:  # -k is the complement of k, plus one
        codes.bitwise_xor_(sign).sub_(sign).bitwise_and_(2**fmt.bits - 1)
    elif fmt.signed:
        codes.bitwise_or_(sign.bitwise_and_(1 << (fmt.bits - 1)))
    del sign  # the result can have its memory
    return codes.to(torch.uint8 if fmt.bits <= 8 else torch.int32)


def _times_power_(x: torch.Tensor, exponent: int) -> torch.Tensor:
    """x 2^exponent in place, where the product is exact; in halves if float32 does not hold the power."""
    if abs(exponent) <= _BIAS:
        return x.mul_(2.0**exponent)
    return x.mul_(2.0 ** (exponent // 2)).mul_(2.0 ** (exponent - exponent // 2))


def decode(codes: torch.Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode uint8 codes of a format of at most 8 bits, to a dtype that holds its values; refuse others."""
    if not holds(dtype, fmt):
        raise UserError(f"{dtype} does not hold every value of {fmt.name}; decode to torch.float32")
    is_cpu, has_chunks = codes.device.type == "cpu", codes.numel() > _CHUNK and codes.is_contiguous()
    if not is_cpu and is_gpu(codes.device) and fmt.bits == 8 and (of_torch := torch_dtype(fmt)) is not None:
        return codes.view(of_torch).to(torch.float32).to(dtype)  # torch's conversion, exact in this direction
    if not (is_cpu and has_chunks) or torch.compiler.is_compiling():
        return _decode(codes, fmt).to(dtype)
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for chunk, out in zip(codes.view(-1).split(_CHUNK), values.view(-1).split(_CHUNK), strict=True):
        out.copy_(_decode(chunk, fmt))
    return values


def _decode(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    code = codes.to(torch.int32)
    if fmt.twos_complement:
        code = code - (code >> (fmt.bits - 1) << fmt.bits)
        return code.to(torch.float32) * fmt.smallest_subnormal
    body = code & (2 ** (fmt.bits - fmt.signed) - 1)
    bits = body << (_MANTISSA - fmt.mantissa_bits)
    if fmt.signed:
        bits.bitwise_or_((code >> (fmt.bits - 1)).bitwise_left_shift_(31))
    values = _times_power_(bits.view(torch.float32), _BIAS - fmt.bias)
    if not fmt.zero:
        values.masked_fill_(code == 0, fmt.smallest_normal)
    if fmt.infinity_code is not None:
        values = torch.where(body == fmt.infinity_code, values * math.inf, values)
        return values.masked_fill_(body > fmt.infinity_code, math.nan)
    if fmt.nan_code is not None:
        with_sign = fmt.specials is Specials.NEGATIVE_ZERO
        values.masked_fill_((code if with_sign else body) == fmt.nan_code, math.nan)
    return values


def pack(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Pack codes into the bytes that are stored.

    Args:
        codes: uint8 codes of shape (..., K).
        fmt: A format of at most 8 bits.

    Returns:
        uint8 bytes of shape (..., ceil(K * bits / 8)). A last, partial group is filled with code 0.
    """
    if fmt.bits == 8:
        return codes
    of_codes, of_bytes = _shifts(fmt, codes.device)
    width = codes.shape[-1]
    codes = torch.nn.functional.pad(codes, (0, -width % len(of_codes)))
    groups = codes.unflatten(-1, (-1, len(of_codes))).to(of_codes.dtype)
    word = (groups << of_codes).sum(-1)
    packed = (word.unsqueeze(-1) >> of_bytes & 255).to(torch.uint8).flatten(-2)
    return packed[..., : math.ceil(width * fmt.bits / 8)]


def unpack(packed: torch.Tensor, fmt: Format, width: int) -> torch.Tensor:
    """Unpack bytes of shape (..., B) to uint8 codes of shape (..., width): the inverse of `pack`."""
    if fmt.bits == 8:
        return packed
    of_codes, of_bytes = _shifts(fmt, packed.device)
    packed = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % len(of_bytes)))
    groups = packed.unflatten(-1, (-1, len(of_bytes))).to(of_bytes.dtype)
    word = (groups << of_bytes).sum(-1)
    codes = (word.unsqueeze(-1) >> of_codes & (2**fmt.bits - 1)).to(torch.uint8).flatten(-2)
    return codes[..., :width]


def _shifts(fmt: Format, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The shifts of (codes, bytes) in the smallest group that fills whole bytes, in a dtype that holds it."""
    shared = math.gcd(fmt.bits, 8)
    dtype = torch.int32 if fmt.bits // shared < 4 else torch.int64
    of_codes, of_bytes = (torch.arange(n // shared, device=device, dtype=dtype) for n in (8, fmt.bits))
    return of_codes * fmt.bits, of_bytes * 8
