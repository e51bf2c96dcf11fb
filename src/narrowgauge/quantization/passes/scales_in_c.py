"""The scales of blocks from their amaxes in C (`scales.c`), with the bits of `quantization.scales`.

Torch computes them in some twenty operations on small tensors, which take longer than rounding a small
matrix.
"""

import ctypes

import torch

from narrowgauge.formats import format
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.passes.c_call import A_THREAD, Pass, c_library, fields_of, share
from narrowgauge.quantization.passes.in_c import has_library
from narrowgauge.quantization.scales import Scales

_RULES = ("floor", "ceil", "even", "rceil", "fp32", "nvfp4")  # in the order of `scales.c`


class _Scales(ctypes.Structure):
    """The struct `Scales` of `scales.c`, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("amax", "encode", "block", "finite", "over", "above")),
        ("format", Pass),
        *((name, ctypes.c_int32) for name in ("rule", "emax", "half", "keeps_power", "zeros")),
        *((name, ctypes.c_float) for name in ("factor", "largest", "instead")),
    ]


def scales_in_c(amax: torch.Tensor, cast: Cast, over: torch.Tensor | None) -> Scales | None:
    """The scales of blocks rounded to nearest, one candidate each; None if C does not compute them.

    Args:
        amax: float32, one entry per block.
        cast: The cast.
        over: The amax of the tensor, 0-dim, for scales under a tensor scale.
    """
    by, fmt = cast.scales, cast.scales.format
    rule = by.rule if fmt == "e8m0" else "nvfp4" if by.are_nvfp4 and not by.by_row else fmt
    is_nearest = by.rounding == "nearest-even" or rule != "nvfp4"
    if rule not in _RULES or not is_nearest or not has_library(amax):
        return None
    amax, above = amax.contiguous(), None
    encode, block = torch.empty_like(amax), torch.empty_like(amax)
    finite = torch.empty_like(amax, dtype=torch.bool)
    one = _Scales(amax.data_ptr(), encode.data_ptr(), block.data_ptr(), finite.data_ptr())
    one.rule, one.emax, one.keeps_power = _RULES.index(rule), cast.element.emax, by.power_of_two
    one.half, one.factor = 1 << (22 - cast.element.fraction_bits), cast.aim
    if rule == "rceil":
        one.factor = 1 / cast.aim
    elif rule == "nvfp4":
        assert over is not None
        above = torch.empty_like(over)
        one.format = Pass(**fields_of(format(fmt)))
        one.over, one.above, one.factor = over.data_ptr(), above.data_ptr(), 1 / cast.aim
        one.largest = cast.target * cast.element.max * by.headroom
        one.instead = {"zero": 0.0, "one": 1.0}.get(by.zero_rule, format(fmt).smallest_subnormal)
        one.zeros = by.zero_rule == "one"
    _run("scale_pass", one, amax)
    return Scales(encode, block, above, finite)


def largest_in_c(amax: torch.Tensor) -> torch.Tensor | None:
    """The largest finite amax, 0-dim float32; None if C does not compute it."""
    if not has_library(amax):
        return None
    amax, largest = amax.contiguous(), torch.empty((), dtype=torch.float32, device=amax.device)
    _run("largest_pass", _Scales(amax.data_ptr(), largest.data_ptr()), amax, threads=1)
    return largest


def _run(name: str, one: _Scales, amax: torch.Tensor, threads: int | None = None) -> None:
    """Call a pass over all blocks, except on the meta device."""
    library = c_library()
    assert library is not None
    if not amax.is_meta:
        share(getattr(library, name), one, amax.numel(), threads or amax.numel() // A_THREAD)
