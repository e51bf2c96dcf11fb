"""Which code computes a cast, and why no faster code does.

    Triton kernel       on a GPU: one pass over a matrix (`kernels.triton`)
    row kernel          on a GPU: scaled rows, whose outliers may be clamped (`kernels.cast.emulate_rows`)
    C passes            on a CPU (`passes`), in a compiled graph as one operator
    torch operations    everything else: the reference, about a dozen passes over the tensor

A gap is the reason, as a clause, why an implementation does not support a cast; "" if it does. It depends
only on the cast, so a plan knows it before there is a tensor. Conditions on the tensor (its shape, device and
sharding, the random bits, a compiler) are checked by the code that has the tensor: `kernels.cast`, `passes`.
"""

from functools import cache
from typing import NamedTuple

from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.keys import Consumer
from narrowgauge.system.devices import Device

#: The places whose operands may stay in the parts that the row kernel writes, if a layer computes in bf16.
ROW_PLACES = ("fprop.x", "fprop.w")

MOST_CANDIDATES = 8  # as in `narrow.h`
#: The values that kernels and C passes know, in the order of `narrow.h`; torch computes a cast with another.
ORDER = {
    "rounding": ("nearest-even", "half-away", "toward-zero", "stochastic"),
    "scale_rule": ("floor", "ceil", "even", "rceil"),
    "choose": ("mae", "mse", "max"),
}
CONVERSION, KERNEL, PASSES, TORCH = "torch conversion", "Triton kernel", "C passes", "torch operations"


class Implementation(NamedTuple):
    """The code that computes a cast."""

    name: str  # `CONVERSION`, `KERNEL`, `PASSES` or `TORCH`
    gap: str  # why no faster code does, as a clause; "" if this is the fastest


def implementation_on(cast: Cast, device: Device, by_rows: bool = False) -> Implementation:
    """The code that computes a cast of a matrix on a device; assumes that a CPU has a C compiler.

    `by_rows`: whether the operand may stay in the parts that the row kernel writes.
    """
    if cast.function:
        return Implementation(TORCH, "the cast is a custom function")
    if not cast.is_scaled:
        return Implementation(CONVERSION, "")
    if device.maker == "cpu":
        gap, fast = passes_gap(cast), PASSES
    elif device.has_triton:
        gap, fast = "" if by_rows and not rows_gap(cast) else kernel_gap(cast), KERNEL
    else:
        gap, fast = f"Triton has no kernels for {device}", KERNEL
    return Implementation(TORCH if gap else fast, gap)


@cache
def kernel_gap(cast: Cast) -> str:
    """Why no Triton kernel computes a cast with scales, as a clause; "" if one does."""
    if gap := _key_gap("Triton kernel", cast, Consumer.KERNEL):
        return gap
    if cast.element.bits > 8:
        return "a code of a Triton kernel is one byte"
    if cast.hadamard not in (0, 16, 32, 64, 128):
        return f"no Triton kernel transforms {cast.hadamard} elements"
    return _tile_gap(cast)


def _tile_gap(cast: Cast) -> str:
    """Why a cast does not fit the kernels' tiles, 32 x 128 and 128 x 32, as a clause; "" if it does.

    A tile holds whole blocks, or lies within one. A tensor scale is known only in the first case, and only in
    the arithmetic of NVFP4.
    """
    rows, columns = cast.block or (0, 0)
    is_small = rows in (1, 2, 4, 8, 16, 32) and columns in (1, 2, 4, 8, 16, 32, 64, 128)
    has_outer = cast.tensor_scale != "none"
    if has_outer and (not cast.has_nvfp4_scales or cast.has_row_scales):
        return f"no Triton kernel has {cast.scale} scales under one in fp32 for each {cast.tensor_scale}"
    is_large = not has_outer and (columns == 0 or rows % 128 == columns % 128 == 0)
    return "" if is_small or is_large else f"blocks of {rows} x {columns} do not divide a kernel's tile"


@cache
def rows_gap(cast: Cast) -> str:
    """Why the row kernel does not compute a cast, as a clause; "" if it does."""
    if cast.scale != "fp32" or cast.block != (1, 0):
        return "the cast does not have a scale in fp32 for each row"
    if cast.is_random or cast.element.bits > 8:
        return "the row kernel rounds to nearest, to codes of a byte"
    return _key_gap("row kernel", cast, Consumer.ROWS)


def passes_gap(cast: Cast) -> str:
    """Why the C passes do not compute a cast, as a clause; "" if they do."""
    if cast.element.exponent_bits == 8:
        return "the C passes do not round to elements with 8 exponent bits"
    if cast.correct and (cast.block is None or cast.block[1] > 1024):
        return "the C passes correct the scales of blocks of at most 1024 elements"
    if len(cast.candidates) > MOST_CANDIDATES:
        return f"the C passes choose among {MOST_CANDIDATES} candidates"
    return _key_gap("C pass", cast, Consumer.C)


def _key_gap(name: str, cast: Cast, engine: Consumer) -> str:
    others = (key for key in ORDER if (value := getattr(cast, key)) and value not in ORDER[key])
    unknown = *cast.unsupported[engine], *others
    return f"no {name} implements {', '.join(unknown)}" if unknown else ""
