"""Calls a pass of `narrow.c`: its records, the threads that share it, and the library that contains it.

The threads of torch's OpenMP share the units of a pass (`team.c`). After an operation of torch they spin for
some milliseconds, so threads of another pool would wait for their cores.
"""

import ctypes
import itertools
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from narrowgauge.devices import is_shape_only
from narrowgauge.formats import RANDOM_BITS, ROUNDINGS, Format, format, round_finite
from narrowgauge.quantization.passes import build
from narrowgauge.quantization.passes.implementations import MOST_CANDIDATES
from narrowgauge.torch_compat import extension_file

A_THREAD = 2**15  # elements per thread, as in torch's operations
# In the order of `narrow.h`.
ROUNDING_MODES = ("nearest-even", "half-away", "toward-zero", "stochastic")
SCALE_RULES = ("floor", "ceil", "even", "rceil", "fp32", "nvfp4", "rounded")
CHOICES = ("mae", "mse", "max")
SIZES = ("batch", "rows", "columns", "block_rows", "block_columns")


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Grid(ctypes.Structure):
    """The struct `Grid` of `narrow.h`: what `formats.rounding` and `formats.codes` use for float32."""

    _fields_ = [
        ("exponent_inverse", ctypes.c_uint32),
        *_fields(ctypes.c_int32, "exponent_min exponent_quantum negative_zero"),
        *_fields(ctypes.c_int32, "bits mantissa_bits twos_complement"),
        ("largest", ctypes.c_float),
    ]

    @classmethod
    def of(cls, element: Format) -> "Grid":
        """The constants of a format."""
        return cls(
            exponent_min=element.emin + 127 << 23,
            exponent_inverse=254 + element.mantissa_bits << 23,
            exponent_quantum=element.mantissa_bits << 23,
            negative_zero=int(element.has_negative_zero),
            bits=element.bits,
            mantissa_bits=element.mantissa_bits,
            twos_complement=int(element.twos_complement),
            largest=element.max,
        )


class CastInC(ctypes.Structure):
    """The struct `Cast` of `narrow.h`."""

    _fields_ = [
        *_fields(Grid, "element scale"),
        *_fields(ctypes.c_int32, "rounding random_bits rule emax half keeps_power zeros to_bf16"),
        *_fields(ctypes.c_int32, "choose candidates"),
        *_fields(ctypes.c_float, "factor aim largest instead"),
        ("stretch", ctypes.c_float * MOST_CANDIDATES),
        ("target", ctypes.c_double),
    ]


class Narrow(ctypes.Structure):
    """The struct `Narrow` of `narrow.h`: one tensor, and what is known of it."""

    _fields_ = [
        ("cast", ctypes.POINTER(CastInC)),
        *_fields(ctypes.c_void_p, "x table uniform over finite amax encode block above out sums top"),
        *_fields(ctypes.c_int64, " ".join(SIZES)),
        ("offset", ctypes.c_uint64),
        ("key", ctypes.c_uint32 * 2),
        *_fields(ctypes.c_int32, "x_type out_type result divides contracts_columns"),
        *_fields(ctypes.c_int32, "is_one is_given over_each only_finite"),
    ]


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


def supports(*tensors: torch.Tensor) -> bool:
    """Whether C computes a layer on these tensors, in a single process.

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


class _Team(ctypes.Structure):
    """The struct `Team` of `team.c`, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("function", "one")),
        *((name, ctypes.c_int64) for name in ("units", "parts", "taken")),
        ("failed", ctypes.c_int32),
    ]


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
        copy = Path(directory, "kept.so")
        for content in build.kept():
            copy.write_bytes(content)  # the verified bytes, whatever happens to the cached file
            if (found := build.opened(copy)) is not None:
                return _declared(found)
        made = build.built(Path(directory))
        found = None if made is None else build.opened(made)
        if made is None or found is None:
            return None
        with ThreadPoolExecutor(1) as other:
            if not other.submit(_is_right, _declared(found)).result():
                return None
        build.keep(made.read_bytes())
        return found
    return None


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    found.units.argtypes, found.units.restype = (ctypes.POINTER(Narrow),), ctypes.c_int64
    return found


def _is_right(found: ctypes.CDLL) -> bool:
    """Whether a library rounds as torch does; in another thread, where torch.export makes no fake tensors."""
    ramp = torch.arange(4099, dtype=torch.float32, device="cpu") / 4099
    x, random = (ramp * 15 - 7.5) * (2 * ramp) ** 8, ramp
    block, encode = torch.ones_like(ramp[:1]), torch.full_like(ramp[:1], 0.875)
    for mode, name in itertools.product(ROUNDINGS, ("e2m1", "e4m3", "int8")):
        out = torch.empty_like(x)
        rounding = {"rounding": ROUNDING_MODES.index(mode), "random_bits": RANDOM_BITS}
        one = Narrow(
            ctypes.pointer(CastInC(Grid.of(format(name)), **rounding)),
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
