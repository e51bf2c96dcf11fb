"""Quantization in C: which tensors it supports, and how it is called. The engine beside `in_torch`.

The passes of `narrow.c` read bf16 and fp32 tensors on a CPU whose blocks lie in the last two dimensions, or
form a single block. Torch operations compute everything else (`supports`): GPU tensors, compiled graphs,
tensors that autograd tracks. For meta tensors, used to estimate memory, results are allocated and no pass is
called.

Arithmetic on small values passes through subnormal numbers, on which CPUs are slow, so codes of bf16 values
are read from tables that `formats.codes_of` and `decode` fill.
"""

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from operator import mul
from typing import Any

import torch

from narrowgauge.formats import Format, RandomStream, codes_of, decode, format
from narrowgauge.quantization.blocks import Blocks
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.passes.c_call import (
    CHOICES,
    ROUNDING_MODES,
    SCALE_RULES,
    SIZES,
    CastInC,
    Grid,
    Narrow,
    c_library,
    call,
    is_plain,
)
from narrowgauge.quantization.passes.implementations import passes_gap
from narrowgauge.quantization.passes.in_torch import Narrowed, Split
from narrowgauge.quantization.scales import Scales
from narrowgauge.torch_compat import unobserved

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
_RESULTS = ("values", "stored", "codes", "scales", "sums")
_ONE_BLOCK = 2**16  # elements per piece of a block that spans the full tensor


def supports(
    split: torch.Tensor, blocks: Blocks, cast: Cast | None = None, dtype: torch.dtype = torch.float32
) -> bool:
    """Whether C quantizes a split tensor: a plain CPU tensor with no autograd and no dispatch mode.

    Args:
        split: The split tensor.
        blocks: Its blocks.
        cast: The cast, if more is wanted than the amaxes of blocks.
        dtype: The dtype of the result.
    """
    if not has_library(split) or split.dtype not in (torch.float32, torch.bfloat16) or dtype not in _TYPES:
        return False
    if cast is not None and passes_gap(cast):
        return False
    is_whole = cast is not None and bool(cast.candidates or cast.correct)
    is_flat = blocks.size[:-2] == (1,) * (len(blocks.size) - 2) or (blocks.is_one and not is_whole)
    return is_flat and bool(blocks.size)


def has_library(x: torch.Tensor) -> bool:
    """Whether the C library may read a tensor: plain, on a CPU, not empty, not tracked by autograd."""
    return is_plain(x) and not (x.requires_grad and torch.is_grad_enabled())


def amax(split: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """`in_torch.amax`."""
    found, top = _amaxes(split, blocks, only_finite=False)
    return top.view(blocks.aligned) if blocks.is_one else found


def largest(split: torch.Tensor, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """`in_torch.largest`."""
    if blocks.is_one:
        found = amax(split, blocks)
        return found, torch.where(found < torch.inf, found, 0.0).view(())
    return _amaxes(split, blocks, only_finite=True)


def narrow(s: Split, result: str, dtype: torch.dtype) -> Narrowed:
    """`in_torch.narrow`."""
    out = torch.empty(s.x.shape, dtype=dtype, device=s.x.device)
    block = torch.empty(0 if result == "stored" else s.blocks.aligned, dtype=torch.float32, device=s.x.device)
    outer = _narrow(s, result, {"out": out, "block": block if block.numel() else None})
    return Narrowed(out, block if s.scales is None else s.scales.block, outer)


def scales(s: Split, with_sums: bool = False) -> tuple[Scales, tuple[torch.Tensor, ...]]:
    """`in_torch.scales`."""
    names = ("encode", "block", *(("out", "sums") if with_sums else ()))
    found = {n: torch.empty(s.blocks.aligned, dtype=torch.float32, device=s.x.device) for n in names}
    outer = _narrow(s, "sums" if with_sums else "scales", found)
    encode, block, *sums = found.values()
    by = Scales(encode, block, outer, ~block.isnan(), s.cast.has_rounded_scales)
    return by if s.scales is None else s.scales, tuple(sums)


def token_sums(x: torch.Tensor) -> torch.Tensor | None:
    """The sum of the finite values of each column of a bf16 matrix, float64; None if C does not support it.

    Values with eight significant bits add up in float64 without rounding if they lie within 33 binades of
    each other (2^12 tokens): then the order of summation, which differs from torch's, does not affect any
    digit.
    """
    if x.ndim != 2 or x.dtype != torch.bfloat16 or not has_library(x):
        return None
    x, (rows, columns) = x.contiguous(), x.shape
    sums = torch.empty(1, columns, dtype=torch.float64, device=x.device)
    sizes = dict(zip(SIZES, (1, rows, columns, rows, 1), strict=True))
    _run(x, "sum_pass", Narrow(x=x.data_ptr(), out=sums.data_ptr(), x_type=_TYPES[x.dtype], **sizes))
    return sums


def encoded(values: torch.Tensor, element: Format) -> torch.Tensor:
    """`formats.codes_of` of values on the grid of a format of at most 8 bits: uint8."""
    if values.dtype != torch.bfloat16 or not has_library(values):
        return codes_of(values, element)
    return _looked_up("encode_pass", values, _codes, element, torch.uint8)


def decoded(codes: torch.Tensor, element: Format, dtype: torch.dtype) -> torch.Tensor:
    """`formats.decode` of uint8 codes."""
    if dtype != torch.bfloat16 or not has_library(codes):
        return decode(codes, element, dtype)
    return _looked_up("decode_pass", codes, _values, element, dtype)


@cache
def _codes(element: Format) -> torch.Tensor:
    """The code of each bf16 value, by its bits; only values of the format are ever looked up.

    Tables outlive the step that makes them, and no account of a step's memory contains them.
    """
    with unobserved():
        every = torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)
        return codes_of(every, element)


@cache
def _values(element: Format) -> torch.Tensor:
    """The bf16 value of each code."""
    with unobserved():
        return decode(torch.arange(256, dtype=torch.uint8, device="cpu"), element, torch.bfloat16)


def _looked_up(
    name: str,
    x: torch.Tensor,
    table: Callable[[Format], torch.Tensor],
    element: Format,
    dtype: torch.dtype,
) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not x.is_meta:
        one = Narrow(x=x.data_ptr(), table=table(element).data_ptr(), out=out.data_ptr())
        call(name, one, x.numel(), x.numel())
    return out


def _amaxes(split: torch.Tensor, blocks: Blocks, only_finite: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls amax_pass: the amax of each block, empty if there is one, and the largest magnitude, 0-dim."""
    split, count = split.contiguous(), 0 if blocks.is_one else blocks.aligned
    found = torch.empty(count, dtype=torch.float32, device=split.device)
    top = torch.zeros((), dtype=torch.float32, device=split.device)
    one = Narrow(x=split.data_ptr(), x_type=_TYPES[split.dtype], **_sizes(split, blocks))
    one.only_finite = only_finite
    one.amax, one.top = found.data_ptr() or None, top.data_ptr()
    _run(split, "amax_pass", one)
    return found, top


def _narrow(s: Split, result: str, wanted: Mapping[str, torch.Tensor | None]) -> torch.Tensor | None:
    """Calls narrow_pass: writes the tensors that are wanted, by their names in C; returns the outer scale."""
    x, cast, blocks, over, outer = s.x.contiguous(), s.cast, s.blocks, s.over, None
    fields: dict[str, Any] = _sizes(x, blocks, bool(cast.candidates or result == "sums"))
    fields |= {"x": x.data_ptr(), "x_type": _TYPES[x.dtype], "result": _RESULTS.index(result)}
    fields |= {"cast": ctypes.pointer(_cast(cast)), "divides": int(cast.has_rounded_scales)}
    fields["contracts_columns"] = int(s.axis % len(blocks.size) == len(blocks.size) - 1)
    known = amax(s.x, blocks) if s.amax is None and fields["is_one"] else s.amax
    tensors = {**wanted, "amax": None if known is None else known.contiguous()}
    if (out := wanted.get("out")) is not None:
        fields["out_type"] = _TYPES[out.dtype]
    if s.scales is not None:
        of_blocks = {"encode": s.scales.encode, "block": s.scales.block, "finite": s.scales.finite}
        tensors |= {name: t.float().expand(blocks.aligned).contiguous() for name, t in of_blocks.items()}
        fields |= {"is_given": 1, "divides": int(s.scales.divides)}
        outer = s.scales.tensor
    elif over is not None:
        each = over.expand(blocks.aligned).contiguous() if over.ndim else over
        outer = torch.empty_like(each)
        tensors |= {"over": each, "above": outer}
        fields["over_each"] = int(over.ndim > 0)
        if outer.shape != over.shape:  # repeated along the row
            outer = outer[tuple(slice(size) for size in over.shape)]
    if cast.rounding == "stochastic" and result != "scales":
        fields |= _random(s, tensors)
    one = Narrow(**fields)
    for name, t in tensors.items():
        setattr(one, name, None if t is None else t.data_ptr())
    _run(x, "narrow_pass", one)
    return outer


def _random(s: Split, tensors: dict[str, torch.Tensor | None]) -> dict[str, Any]:
    """The fields of a stream; explicit values are added to the tensors."""
    random = s.context.random_over(s.blocks)
    if isinstance(random, RandomStream):
        if s.x.is_meta:  # a meta key has no values
            return {}
        words = [word % 2**32 for word in random.key.tolist()]
        return {"key": (ctypes.c_uint32 * 2)(*words), "offset": int(random.offset) % 2**64}
    if not isinstance(random, torch.Tensor):
        random = torch.rand(s.x.shape, dtype=torch.float32, generator=random, device=s.x.device)
    tensors["uniform"] = random.expand(s.x.shape).float().contiguous()
    return {}


@cache
def _cast(cast: Cast) -> CastInC:
    """What a cast says, for C."""
    fmt, candidates = format(cast.scale), cast.candidates
    rule = "fp32" if cast.scale == "fp32" else cast.scale_rule
    rule = rule or ("nvfp4" if cast.has_nvfp4_scales else "rounded")
    found = CastInC(Grid.of(cast.element), Grid.of(fmt))
    found.rounding, found.random_bits = ROUNDING_MODES.index(cast.rounding), cast.random_bits
    found.rule, found.emax, found.keeps_power = SCALE_RULES.index(rule), cast.element.emax, cast.power_of_two
    found.half, found.aim, found.target = 1 << (22 - cast.element.fraction_bits), cast.aim, cast.target
    found.factor = 1 / cast.aim if rule in ("rceil", "nvfp4") else cast.aim
    found.zeros, found.to_bf16 = cast.zero_rule == "one", cast.scale == "bf16"
    found.instead = {"zero": 0.0, "one": 1.0}.get(cast.zero_rule, fmt.smallest_subnormal)
    found.largest = (
        cast.target * cast.element.max * cast.headroom if cast.has_nvfp4_scales else cast.target * cast.aim
    )
    found.choose, found.candidates = CHOICES.index(cast.choose or "mae"), len(candidates)
    found.stretch[: len(candidates)] = [cast.element.max / candidate for candidate in candidates]
    return found


def _run(x: torch.Tensor, name: str, one: Narrow) -> None:
    """Call a pass, unless its tensor is on the meta device; part of a meta tensor has a non-zero address."""
    if x.is_meta:
        return
    library = c_library()
    assert library is not None
    call(name, one, int(library.units(ctypes.byref(one))), x.numel())


def _sizes(split: torch.Tensor, blocks: Blocks, is_whole: bool = False) -> dict[str, int]:
    """The sizes of a split tensor. A block that spans it may be cut: its pieces share a scale."""
    shape = tuple(map(mul, blocks.grid, blocks.size))
    is_one = blocks.is_one and not is_whole
    if is_one:
        values = (1, 1, split.numel(), 1, min(split.numel(), _ONE_BLOCK))
    elif len(shape) == 1 or blocks.size[-2] == 1:  # one long row, so that tiles are full
        values = (1, 1, prod(shape), 1, blocks.size[-1])
    else:
        values = (prod(shape[:-2]), shape[-2], shape[-1], blocks.size[-2], blocks.size[-1])
    return dict(zip(SIZES, values, strict=True)) | {"is_one": int(is_one)}
