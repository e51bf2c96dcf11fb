"""Quantization in C: what it supports, its library, and how it is called. The engine beside `in_torch`.

The passes of `narrow.c` read bf16 and fp32 tensors on a CPU whose blocks lie in the last two dimensions, or
form a single block. Torch operations compute everything else (`supports`): GPU tensors, compiled graphs,
tensors that autograd tracks. For meta tensors, used to estimate memory, results are allocated and no pass is
called.

Arithmetic on small values passes through subnormal numbers, on which CPUs are slow, so the bf16 values of
codes are read from a table that `formats.decode` fills.

The threads of torch's OpenMP share the units of a pass. After an operation of torch they spin for some
milliseconds, so threads of another pool would wait for their cores.
"""

import ctypes
import itertools
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from math import prod
from operator import mul
from pathlib import Path
from typing import Any

import torch

from narrowgauge.formats import RANDOM_BITS, Format, RandomStream, decode, format, round_finite
from narrowgauge.quantization.blocks import Blocks
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.passes import build
from narrowgauge.quantization.passes.implementations import ORDER, passes_gap
from narrowgauge.quantization.passes.in_torch import Narrowed, Split
from narrowgauge.quantization.scales import Scales
from narrowgauge.system.devices import is_shape_only
from narrowgauge.system.torch_compat import extension_file, unobserved

A_THREAD = 2**15  # elements per thread, as in torch's operations
SCALE_RULES = (*ORDER["scale_rule"], "fp32", "nvfp4", "rounded")  # in the order of `narrow.h`
SIZES = ("batch", "rows", "columns", "block_rows", "block_columns")
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
_RESULTS = ("values", "stored", "codes", "scales", "sums")
_ONE_BLOCK = 2**16  # elements per piece of a block that spans the full tensor
_Grid, _Cast, _Narrow, _Team = map(build.struct, ("Grid", "Cast", "Narrow", "Team"))


def supports(
    split: torch.Tensor, blocks: Blocks, cast: Cast | None = None, dtype: torch.dtype = torch.float32
) -> bool:
    """Whether C quantizes a split tensor; without a cast, whether it finds the amaxes of its blocks.

    `dtype` is that of the result.
    """
    if not has_library(split) or split.dtype not in (torch.float32, torch.bfloat16) or dtype not in _TYPES:
        return False
    if cast is not None and not _in_c(cast):
        return False
    is_whole = cast is not None and bool(cast.candidates or cast.correct)
    is_flat = blocks.size[:-2] == (1,) * (len(blocks.size) - 2) or (blocks.is_one and not is_whole)
    return is_flat and bool(blocks.size)


def has_library(x: torch.Tensor) -> bool:
    """Whether the C library may read a tensor: plain, on a CPU, not empty, not tracked by autograd."""
    return is_plain(x) and not (x.requires_grad and torch.is_grad_enabled())


def amax(split: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """`in_torch.amax`."""
    split, sizes = split.contiguous(), _sizes(split, blocks) | {"is_one": 0}
    pieces = -(-split.numel() // sizes["block_columns"])
    found = torch.empty(pieces if blocks.is_one else blocks.aligned, dtype=torch.float32, device=split.device)
    pointers = {"x": split.data_ptr(), "amax": found.data_ptr()}
    _run(split, "amax_pass", _Narrow(**pointers, x_type=_TYPES[split.dtype], **sizes))
    return found.amax().view(blocks.aligned) if blocks.is_one else found


def narrow(s: Split, result: str, dtype: torch.dtype) -> Narrowed:
    """`in_torch.narrow`."""
    out = torch.empty(s.x.shape, dtype=dtype, device=s.x.device)
    block = torch.empty(0 if result == "stored" else s.blocks.aligned, dtype=torch.float32, device=s.x.device)
    outer = _narrow(s, result, {"out": out, "block": block if block.numel() else None})
    return out, block if s.scales is None else s.scales.block, outer


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
    x, sums = x.contiguous(), torch.empty(1, x.shape[1], dtype=torch.float64, device=x.device)
    sizes = dict(zip(SIZES, (1, *x.shape, len(x), 1), strict=True))
    _run(x, "sum_pass", _Narrow(x=x.data_ptr(), out=sums.data_ptr(), x_type=_TYPES[x.dtype], **sizes))
    return sums


def decoded(codes: torch.Tensor, element: Format, dtype: torch.dtype) -> torch.Tensor:
    """`formats.decode` of uint8 codes."""
    if dtype != torch.bfloat16 or not has_library(codes):
        return decode(codes, element, dtype)
    codes, out = codes.contiguous(), torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if not codes.is_meta:
        one = _Narrow(x=codes.data_ptr(), table=_values(element).data_ptr(), out=out.data_ptr())
        call("decode_pass", one, codes.numel(), codes.numel())
    return out


@cache
def _values(element: Format) -> torch.Tensor:
    """The bf16 value of each code; it outlives a step, and no account of a step's memory contains it."""
    with unobserved():
        return decode(torch.arange(256, dtype=torch.uint8, device="cpu"), element, torch.bfloat16)


def _narrow(s: Split, result: str, wanted: Mapping[str, torch.Tensor | None]) -> torch.Tensor | None:
    """Calls narrow_pass: writes the tensors that are wanted, by their names in C; returns the outer scale."""
    x, cast, blocks, over, outer = s.x.contiguous(), s.cast, s.blocks, s.over, None
    fields: dict[str, Any] = _sizes(x, blocks, bool(cast.candidates or result == "sums"))
    fields |= {"x": x.data_ptr(), "x_type": _TYPES[x.dtype], "result": _RESULTS.index(result)}
    fields |= {"cast": ctypes.addressof(_in_c(cast)), "divides": int(cast.has_rounded_scales)}
    fields["contracts_columns"] = int(s.axis % len(blocks.size) == len(blocks.size) - 1)
    tensors = {**wanted, "amax": None if s.amax is None else s.amax.contiguous()}
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
    for name, t in tensors.items():
        fields[name] = None if t is None else t.data_ptr()
    _run(x, "narrow_pass", _Narrow(**fields))
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


def _in_c(cast: Cast) -> Any:
    """What a cast says, for C, kept with the cast; None where the passes do not compute it."""
    kept = vars(cast)  # not a dictionary by cast, whose hash and comparison are calls
    if "in_c" not in kept:
        kept["in_c"] = None if passes_gap(cast) else _made(cast)
    return kept["in_c"]


def _grid(element: Format) -> Any:
    """What `formats.rounding` and `formats.codes` use of a format for float32."""
    return _Grid(
        exponent_min=element.emin + 127 << 23,
        exponent_inverse=254 + element.mantissa_bits << 23,
        exponent_quantum=element.mantissa_bits << 23,
        negative_zero=element.has_negative_zero,
        bits=element.bits,
        mantissa_bits=element.mantissa_bits,
        twos_complement=element.twos_complement,
        largest=element.max,
    )


def _made(cast: Cast) -> Any:
    fmt, candidates = format(cast.scale), cast.candidates
    rule = "fp32" if cast.scale == "fp32" else cast.scale_rule
    rule = rule or ("nvfp4" if cast.has_nvfp4_scales else "rounded")
    found = _Cast(_grid(cast.element), _grid(fmt))
    found.rounding, found.random_bits = ORDER["rounding"].index(cast.rounding), cast.random_bits
    found.rule, found.emax, found.keeps_power = SCALE_RULES.index(rule), cast.element.emax, cast.power_of_two
    found.half, found.aim, found.target = 1 << (22 - cast.element.fraction_bits), cast.aim, cast.target
    found.factor = 1 / cast.aim if rule in ("rceil", "nvfp4") else cast.aim
    found.zeros, found.to_bf16 = cast.zero_rule == "one", cast.scale == "bf16"
    found.instead = {"zero": 0.0, "one": 1.0}.get(cast.zero_rule, fmt.smallest_subnormal)
    found.largest = (
        cast.target * cast.element.max * cast.headroom if cast.has_nvfp4_scales else cast.target * cast.aim
    )
    found.choose, found.candidates = ORDER["choose"].index(cast.choose or "mae"), len(candidates)
    found.stretch[: len(candidates)] = [cast.element.max / candidate for candidate in candidates]
    return found


def _run(x: torch.Tensor, name: str, one: ctypes.Structure) -> None:
    """Call a pass, unless its tensor is on the meta device; part of a meta tensor has a non-zero address."""
    if x.is_meta:
        return
    library = c_library()
    assert library is not None
    call(name, one, library.units(ctypes.byref(one)), x.numel())


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


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether C may read tensors: plain ones on a CPU, in eager code, the first of them not empty.

    Meta tensors may stand for these: results are allocated and nothing is called. Where several processes are
    simulated, a shard stands for the tensor that they hold together, and torch draws its random bits.
    """
    if torch.compiler.is_compiling() or os.environ.get("NARROWGAUGE_KERNELS") == "0":
        return False
    for x in tensors:
        is_here = x.device.type == "cpu" or (is_shape_only(x) and not torch.distributed.is_initialized())
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or not is_here:
            return False
    return tensors[0].numel() > 0 and c_library() is not None


def computes_layer(*tensors: torch.Tensor) -> bool:
    """Whether C computes a layer on these tensors: norms, positions; in a single process.

    Plans of several processes count torch's operations, so torch runs them there.
    """
    return not torch.distributed.is_initialized() and is_plain(*tensors)


def call(name: str, one: ctypes.Structure, units: int, elements: int) -> None:
    """Call a function of the library on units 0 to `units`; threads of torch share many elements.

    Raises:
        MemoryError: It could not allocate its memory.
    """
    found = c_library()
    assert found is not None
    function, openmp = getattr(found, name), _openmp()
    parts = min(torch.get_num_threads(), elements // A_THREAD, units)
    if parts <= 1 or openmp is None:
        failed = function(ctypes.byref(one), ctypes.c_int64(0), ctypes.c_int64(units))
    else:
        team = _Team(ctypes.cast(function, ctypes.c_void_p), ctypes.addressof(one), units, parts)
        # Of the default size, like torch's: OpenMP of GCC ends threads that a smaller team does not need.
        openmp.GOMP_parallel(found.join_team, ctypes.byref(team), 0, 0)
        failed = team.failed
    if failed:
        raise MemoryError(f"{name} of the C passes could not allocate its memory")


@cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP that torch is linked with; None if it has another entry point than GCC's."""
    found = ctypes.CDLL(extension_file())  # symbols are also looked up in what it is linked with
    if not hasattr(found, "GOMP_parallel"):  # LLVM's and Intel's OpenMP have it as well
        return None
    found.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    found.GOMP_parallel.restype = None
    return found


@cache
def c_library() -> ctypes.CDLL | None:
    """The compiled passes, built and checked if they are not in the cache; None if that is impossible."""
    # If the disk is full, torch operations replace the passes, with the same bits.
    with suppress(OSError), tempfile.TemporaryDirectory(prefix="narrowgauge-") as directory:
        library = Path(directory, "passes.so")
        for content in build.kept():
            library.write_bytes(content)  # the verified bytes, whatever happens to the cached file
            with suppress(OSError):  # it may be of another C library
                return ctypes.CDLL(str(library))
        if build.compiled(library):
            found = ctypes.CDLL(str(library))
            with ThreadPoolExecutor(1) as other:
                is_right = other.submit(_is_right, found).result()
            if is_right:
                build.keep(library.read_bytes())
                return found
    return None


def _is_right(found: ctypes.CDLL) -> bool:
    """Whether a library rounds as torch does; in another thread, where torch.export makes no fake tensors."""
    ramp = torch.arange(4099, dtype=torch.float32, device="cpu") / 4099
    x, random = (ramp * 15 - 7.5) * (2 * ramp) ** 8, ramp
    block, encode = torch.ones_like(ramp[:1]), torch.full_like(ramp[:1], 0.875)
    for mode, name in itertools.product(ORDER["rounding"], ("e2m1", "e4m3", "int8")):
        out = torch.empty_like(x)
        rounding = {"rounding": ORDER["rounding"].index(mode), "random_bits": RANDOM_BITS}
        by = _Cast(_grid(format(name)), **rounding)
        one = _Narrow(
            ctypes.addressof(by),
            **dict(zip(SIZES, (1, 1, 4099, 1, 4099), strict=True)),
            **{"x": x.data_ptr(), "out": out.data_ptr(), "uniform": random.data_ptr(), "is_given": 1},
            **{"encode": encode.data_ptr(), "block": block.data_ptr(), "finite": block.data_ptr()},
        )
        units = ctypes.c_int64(found.units(ctypes.byref(one)))
        found.narrow_pass(ctypes.byref(one), ctypes.c_int64(0), units)
        expected = round_finite(x * encode, format(name), mode, random)
        if not torch.equal(out.view(torch.int32), expected.view(torch.int32)):
            return False
    return True
