"""Codes of bf16 values and back, by table: `formats.encode` and `decode` fill the tables, C reads them.

Arithmetic on codes of small values passes through subnormal numbers, on which CPUs are slow.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from narrowgauge.formats import Format, decode, encode
from narrowgauge.quantization.passes.c_call import A_THREAD, c_library, share
from narrowgauge.quantization.passes.in_c import has_library


class _Lookup(ctypes.Structure):
    """The struct `Lookup` of `scales.c`, field by field."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "table", "out")]


def encoded(values: torch.Tensor, element: Format) -> torch.Tensor:
    """`formats.encode` of values on the grid of a format of at most 8 bits: uint8."""
    if values.dtype != torch.bfloat16 or not has_library(values):
        return encode(values, element)
    return _looked_up("encode_pass", values, _codes, element, torch.uint8)


def decoded(codes: torch.Tensor, element: Format, dtype: torch.dtype) -> torch.Tensor:
    """`formats.decode` of uint8 codes."""
    if dtype != torch.bfloat16 or not has_library(codes):
        return decode(codes, element, dtype)
    return _looked_up("decode_pass", codes, _values, element, dtype)


@cache
def _codes(element: Format) -> torch.Tensor:
    """The code of each bf16 value, by its bits; only values of the format are ever looked up."""
    every = torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)
    return encode(every, element)


@cache
def _values(element: Format) -> torch.Tensor:
    """The bf16 value of each code."""
    return decode(torch.arange(256, dtype=torch.uint8, device="cpu"), element, torch.bfloat16)


def _looked_up(
    name: str,
    x: torch.Tensor,
    table: Callable[[Format], torch.Tensor],
    element: Format,
    dtype: torch.dtype,
) -> torch.Tensor:
    x, library = x.contiguous(), c_library()
    assert library is not None
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not x.is_meta:
        one = _Lookup(x.data_ptr(), table(element).data_ptr(), out.data_ptr())
        share(getattr(library, name), one, x.numel(), x.numel() // A_THREAD)
    return out
