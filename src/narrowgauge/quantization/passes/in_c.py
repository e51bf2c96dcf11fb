"""The passes in C: which tensors they support, and how they are called.

The passes of `passes.c` take bf16 and fp32 tensors on a CPU whose blocks lie in the last two dimensions, or
form a single block. Torch operations compute everything else (`takes`): GPU tensors, compiled graphs, tensors
that autograd tracks. For meta tensors, used to estimate memory, results are allocated and no pass is called.

The passes of `scales.c` replace many operations on small tensors: scales of blocks from their amaxes, and
codes of bf16 values. Arithmetic on small values passes through subnormal numbers, on which CPUs are slow, so
codes are read from tables that `formats.codes_of` and `decode` fill.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch

from narrowgauge.devices import is_shape_only
from narrowgauge.formats import Format, Randomness, RandomStream, codes_of, decode, format
from narrowgauge.quantization.blocks import Blocks
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.passes.c_call import (
    A_THREAD,
    MODES,
    SIZES,
    Pass,
    c_library,
    fields_of,
    run,
    share,
)
from narrowgauge.quantization.passes.implementations import passes_gap
from narrowgauge.quantization.scales import Scales
from narrowgauge.torch_compat import unobserved

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
RESULTS = ("values", "stored", "codes")  # the element; the element times its block's scale; its code
_CHOICES = ("mae", "mse", "max")
_RULES = ("floor", "ceil", "even", "rceil", "fp32", "nvfp4", "rounded")  # of scales, as in `scales.c`
TILE = 1024  # elements that a thread holds at a time
_ONE_BLOCK = 2**16  # elements per piece of a block that spans the full tensor


class Rounding(NamedTuple):
    """How elements are rounded to the grid."""

    encode: torch.Tensor  #: the factor or divisor of elements, one per block
    divides: bool
    cast: Cast
    random: Randomness


class Judged(NamedTuple):
    """The inputs of a block's error: `passes.errors.block_errors`."""

    block: torch.Tensor  #: its scale
    above: torch.Tensor | None  #: its outer scale
    divisor: float  #: a divisor of its values
    choose: str
    contracted: int  #: the contracted dimension


def takes(
    split: torch.Tensor,
    blocks: Blocks,
    cast: Cast | None = None,
    dtype: torch.dtype = torch.float32,
    is_whole: bool = False,
) -> bool:
    """Whether the C pass supports a split tensor: a plain CPU tensor with no autograd and no dispatch mode.

    Args:
        split: The split tensor.
        blocks: Its blocks.
        cast: The cast whose elements it is rounded to, if any.
        dtype: The dtype of the result.
        is_whole: Whether the values of a block are needed together.
    """
    if not has_library(split) or split.dtype not in (torch.float32, torch.bfloat16) or dtype not in _TYPES:
        return False
    if cast is not None and passes_gap(cast):
        return False
    is_flat = blocks.size[:-2] == (1,) * (len(blocks.size) - 2) or (_is_one(blocks) and not is_whole)
    return is_flat and bool(blocks.size)


def has_library(x: torch.Tensor) -> bool:
    """Whether the C library may read a tensor: plain, on a CPU, not empty, not tracked by autograd."""
    if torch.compiler.is_compiling() or os.environ.get("NARROWGAUGE_KERNELS") == "0":
        return False
    is_here = x.device.type == "cpu" or _stands_for_cpu(x)
    is_plain = type(x) in (torch.Tensor, torch.nn.Parameter) and is_here and x.numel() > 0
    is_followed = x.requires_grad and torch.is_grad_enabled()
    return is_plain and not is_followed and c_library() is not None


def amax(split: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The amax of each block, in the shape of the grid, float32."""
    split, sizes = split.contiguous(), _sizes(split, blocks)
    found = torch.empty(_grid(sizes), dtype=torch.float32, device=split.device)
    one = Pass(x=split.data_ptr(), out=found.data_ptr(), x_type=_TYPES[split.dtype], **sizes)
    _run(split, "amax_pass", one)
    return found.view(blocks.grid) if found.numel() == prod(blocks.grid) else found.amax().view(blocks.grid)


def token_sums(x: torch.Tensor) -> torch.Tensor | None:
    """The sum of the finite values of each column of a bf16 matrix, float64; None if C does not support it.

    Values with eight significant bits add up in float64 without rounding if they lie within 33 binades of
    each other (2^12 tokens): then the order of summation, which differs from torch's, does not affect any
    digit.
    """
    one = Blocks.of(x.shape, (1,) * x.ndim)
    if x.ndim != 2 or x.dtype != torch.bfloat16 or not takes(x, one):
        return None
    x, (rows, columns) = x.contiguous(), x.shape
    sums = torch.empty(1, columns, dtype=torch.float64, device=x.device)
    sizes = dict(zip(SIZES, (1, rows, columns, rows, 1), strict=True))
    _run(x, "sum_pass", Pass(x=x.data_ptr(), out=sums.data_ptr(), x_type=_TYPES[x.dtype], **sizes))
    return sums


def rounded(
    split: torch.Tensor,
    blocks: Blocks,
    rounding: Rounding,
    result: str,
    block: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`passes.rounding.round_blocks`; `block` is a block's scale, or for "codes" whether it is finite."""
    split, sizes = split.contiguous(), _sizes(split, blocks)
    out = torch.empty(split.shape, dtype=dtype, device=split.device)
    of_blocks = _entries(block, blocks, sizes)
    kept, fields = _fields(split, blocks, sizes, rounding)
    fields |= {"block": of_blocks.data_ptr(), "out": out.data_ptr(), "out_type": _TYPES[dtype]}
    _run(split, "round_pass", Pass(**fields | {"result": RESULTS.index(result)}, **sizes))
    del kept  # the pass has read it
    return out


def errors(split: torch.Tensor, blocks: Blocks, rounding: Rounding, judged: Judged) -> torch.Tensor:
    """The error of each block, in the shape of the grid, float32."""
    split, sizes = split.contiguous(), _sizes(split, blocks, is_whole=True)
    found = torch.empty(_grid(sizes), dtype=torch.float32, device=split.device)
    of_blocks = _entries(judged.block, blocks, sizes)
    above = None if judged.above is None else _entries(judged.above, blocks, sizes)
    kept, fields = _fields(split, blocks, sizes, rounding)
    fields |= {"block": of_blocks.data_ptr(), "above": None if above is None else above.data_ptr()}
    fields |= {"out": found.data_ptr(), "divisor": judged.divisor}
    fields["contracts_columns"] = int(judged.contracted == len(blocks.size) - 1)
    _run(split, "error_pass", Pass(**fields | {"choose": _CHOICES.index(judged.choose)}, **sizes))
    del kept
    return found.view(blocks.grid)


def projections(
    split: torch.Tensor, blocks: Blocks, rounding: Rounding, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums of t^2, of t q) of each block, in its split shape (`passes.errors.projection_sums`)."""
    split, sizes = split.contiguous(), _sizes(split, blocks, is_whole=True)
    above = torch.empty(_grid(sizes), dtype=torch.float32, device=split.device)
    below, of_blocks = torch.empty_like(above), _entries(seen, blocks, sizes)
    kept, fields = _fields(split, blocks, sizes, rounding)
    fields |= {"block": of_blocks.data_ptr(), "out": above.data_ptr(), "sums": below.data_ptr()}
    _run(split, "projection_pass", Pass(**fields, **sizes))
    del kept
    return blocks.align(above.view(blocks.grid)), blocks.align(below.view(blocks.grid))


def block_scales(
    amax: torch.Tensor, cast: Cast, over: torch.Tensor | None, candidate: float = 0.0
) -> Scales | None:
    """The scales of blocks rounded to nearest; None if C does not compute them.

    Args:
        amax: float32, one entry per block.
        cast: The cast.
        over: The amax of the tensor (0-dim), or of each row or group of columns (broadcasts to `amax`), for
            scales under an outer scale.
        candidate: The magnitude that a block's amax is mapped to; 0 for the largest element.
    """
    fmt, is_outer = cast.scale, cast.has_nvfp4_scales or cast.has_rounded_scales
    rule = (
        fmt
        if fmt in ("fp32", "none")
        else cast.scale_rule or ("nvfp4" if cast.has_nvfp4_scales else "rounded")
    )
    if rule not in _RULES or cast.scale_rounding != "nearest-even" or not has_library(amax):
        return None
    amax, above = amax.contiguous(), None
    encode_scale, block = torch.empty_like(amax), torch.empty_like(amax)
    finite = torch.empty_like(amax, dtype=torch.bool)
    one = _Scales(amax.data_ptr(), encode_scale.data_ptr(), block.data_ptr(), finite.data_ptr())
    one.rule, one.emax, one.keeps_power = _RULES.index(rule), cast.element.emax, cast.power_of_two
    one.half, one.factor = 1 << (22 - cast.element.fraction_bits), cast.aim
    if rule == "rceil":
        one.factor = 1 / cast.aim
    elif is_outer:
        one.format, one.to_bf16 = Pass(**fields_of(format(fmt))), fmt == "bf16"
        one.factor, one.aim, one.target = 1 / cast.aim, cast.aim, cast.target
        one.stretch = cast.element.max / candidate if candidate else 0.0
        one.instead = {"zero": 0.0, "one": 1.0}.get(cast.zero_rule, format(fmt).smallest_subnormal)
        one.zeros = cast.zero_rule == "one"
    if over is not None and is_outer:
        one.over_each = over.ndim > 0
        each = over.expand_as(amax).contiguous() if over.ndim else over
        above = torch.empty_like(each)
        one.over, one.above = each.data_ptr(), above.data_ptr()
        one.largest = (
            cast.target * cast.element.max * cast.headroom
            if cast.has_nvfp4_scales
            else cast.target * cast.aim
        )
    _share(amax, "scale_pass", one)
    if over is not None and above is not None and above.shape != over.shape:  # repeated along the row
        above = above[tuple(slice(size) for size in over.shape)]
    return Scales(encode_scale, block, above, finite, cast.has_rounded_scales)


def largest_finite(amax: torch.Tensor) -> torch.Tensor | None:
    """The largest finite amax, 0-dim float32; None if C does not compute it."""
    if not has_library(amax):
        return None
    amax, largest = amax.contiguous(), torch.empty((), dtype=torch.float32, device=amax.device)
    _share(amax, "largest_pass", _Scales(amax.data_ptr(), largest.data_ptr()), threads=1)
    return largest


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


class _Scales(ctypes.Structure):
    """The struct `Scales` of `scales.c`, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("amax", "encode", "block", "finite", "over", "above")),
        ("format", Pass),
        *((name, ctypes.c_int32) for name in ("rule", "emax", "half", "keeps_power", "zeros")),
        *((name, ctypes.c_int32) for name in ("over_each", "to_bf16")),
        *((name, ctypes.c_float) for name in ("factor", "largest", "instead", "aim", "stretch")),
        ("target", ctypes.c_double),
    ]


class _Lookup(ctypes.Structure):
    """The struct `Lookup` of `scales.c`, field by field."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "table", "out")]


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
        _share(x, name, _Lookup(x.data_ptr(), table(element).data_ptr(), out.data_ptr()))
    return out


def _share(x: torch.Tensor, name: str, one: ctypes.Structure, threads: int | None = None) -> None:
    """Call a pass over all elements of a tensor, unless it is on the meta device."""
    library = c_library()
    assert library is not None
    if not x.is_meta:
        share(getattr(library, name), one, x.numel(), threads or x.numel() // A_THREAD)


def _stands_for_cpu(split: torch.Tensor) -> bool:
    """Whether a meta tensor stands for a CPU tensor of a single process.

    Where several processes are simulated, a shard stands for the tensor that they hold together, and torch
    draws its random bits.
    """
    return is_shape_only(split) and not torch.distributed.is_initialized()


def _run(split: torch.Tensor, name: str, one: Pass) -> None:
    """Call a pass, unless its tensor is on the meta device; part of a meta tensor has a non-zero address."""
    if not split.is_meta:
        run(name, one)


def _fields(
    split: torch.Tensor, blocks: Blocks, sizes: dict[str, int], rounding: Rounding
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """(tensors to keep alive during the pass, the fields of rounding)."""
    encode, cast, random = _entries(rounding.encode, blocks, sizes), rounding.cast, rounding.random
    fields = fields_of(cast.element) | {"divisor": 1.0}
    fields |= {"x": split.data_ptr(), "x_type": _TYPES[split.dtype], "encode": encode.data_ptr()}
    fields |= {"divides": int(rounding.divides), "rounding": MODES.index(cast.rounding)}
    fields["random_bits"] = cast.random_bits
    if cast.rounding != "stochastic":
        return [encode], fields
    if split.is_meta and isinstance(random, RandomStream):
        return [encode], fields  # a meta key has no values
    if isinstance(random, RandomStream):
        words = [word % 2**32 for word in random.key.tolist()]
        offset = int(random.offset) % 2**64
        return [encode], fields | {"key": (ctypes.c_uint32 * 2)(*words), "offset": offset}
    if not isinstance(random, torch.Tensor):
        random = torch.rand(split.shape, dtype=torch.float32, generator=random, device=split.device)
    uniform = random.expand(split.shape).float().contiguous()
    return [encode, uniform], fields | {"uniform": uniform.data_ptr()}


def _is_one(blocks: Blocks) -> bool:
    return prod(blocks.grid) == 1


def _sizes(split: torch.Tensor, blocks: Blocks, is_whole: bool = False) -> dict[str, int]:
    """The sizes of a split tensor. A block that spans it may be cut: its pieces share a scale."""
    shape = [g * b for g, b in zip(blocks.grid, blocks.size, strict=True)]
    if _is_one(blocks) and not is_whole:
        values = (1, 1, split.numel(), 1, min(split.numel(), _ONE_BLOCK))
    elif len(shape) == 1 or blocks.size[-2] == 1:  # one long row, so that tiles are full
        values = (1, 1, prod(shape), 1, blocks.size[-1])
    else:
        values = (prod(shape[:-2]), shape[-2], shape[-1], blocks.size[-2], blocks.size[-1])
    return dict(zip(SIZES, values, strict=True))


def _grid(sizes: dict[str, int]) -> tuple[int, int, int]:
    rows, columns = sizes["rows"], sizes["columns"]
    return sizes["batch"], -(-rows // sizes["block_rows"]), -(-columns // sizes["block_columns"])


def _entries(of: torch.Tensor, blocks: Blocks, sizes: dict[str, int]) -> torch.Tensor:
    """A tensor that stands over a split tensor, as float32 in memory with one entry per block or piece."""
    if prod(_grid(sizes)) != prod(blocks.grid):
        return of.reshape(()).float().expand(_grid(sizes)).contiguous()
    return of.float().expand(blocks.aligned).contiguous()
