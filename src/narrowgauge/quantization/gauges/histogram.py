"""A histogram of a tensor's magnitudes on the grid of its format, before and after rounding.

A magnitude is measured in units of its block's scale, where the grid is that of the element format: 0, 0.5,
1, 1.5, 2, 3, 4 and 6 for E2M1. Bins are numbered from 1 = 2^0; with n bins per octave, bin b begins at

    2^floor(b / n) * (1 + (b mod n) / n)

so a grid value lies at the lower edge of a bin if the format has at most log2 n mantissa bits. Bins reach
from 6 octaves below the smallest value to 3 above the largest; the first and the last also count what lies
beyond. n is 4, 2 or 1, the most that fits in `BINS` bins. Zeros are counted separately; non-finite elements
are skipped.

The histogram samples a few thousand elements, evenly spaced along every dimension, with odd strides: sequence
and head lengths have many factors of 2, and an even stride would always hit the same positions. In a ragged
block at the edge of a tensor, padding counts as zeros, before and after.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from narrowgauge.formats import Format
from narrowgauge.quantization.gauges.bins import BINS, Bins, bins_of
from narrowgauge.system.torch_compat import not_strict

SAMPLE = 4096  # elements, roughly
WIDTH = 2 * (BINS + 1)  # of the vector
_NUDGE = 1 + 2.0**-20  # a grid value may have lost its last bit in the division by its scale
_MANTISSA = 23  # bits of float32


def histogram(
    split: torch.Tensor, after: torch.Tensor, scale: torch.Tensor | None, fmt: Format
) -> torch.Tensor:
    """Count a sample of a split tensor before and after, without a GPU sync.

    Args:
        split: The tensor before, of any floating dtype.
        after: The tensor after, in the same shape.
        scale: The float32 scale of each block, inner dimensions of size 1, or 0-dim; None for 1.
        fmt: The format of an element.

    Returns:
        float64 [WIDTH], for `counts`.
    """
    strides, bins = _strides(split.shape), bins_of(fmt)
    unit = None if scale is None else _sample(scale, strides)
    return torch.cat([_count(_sample(t, strides), unit, bins) for t in (split, after)])


def counts(vector: Sequence[float], fmt: Format) -> dict[str, Any] | None:
    """The counts of `histogram` as a record; None if it was not called.

    It has `zeros` [before, after], and `before` and `after` for each bin from number `first` on.
    """
    before, after = ([int(n) for n in vector[i : i + BINS + 1]] for i in (0, BINS + 1))
    if not sum(before):
        return None
    held = [i for i in range(1, BINS + 1) if before[i] or after[i]] or [1]
    bins, used = bins_of(fmt), slice(held[0], held[-1] + 1)
    return {
        "element": fmt.name,
        "per_octave": bins.per_octave,
        "first": bins.low * bins.per_octave + held[0] - 1,
        "zeros": [before[0], after[0]],
        "before": before[used],
        "after": after[used],
    }


def _count(x: torch.Tensor, scale: torch.Tensor | None, bins: Bins) -> torch.Tensor:
    """float64 [BINS + 1]: the number of zeros, then the number of elements in each bin."""
    x = x.float().abs()
    units = x * _NUDGE if scale is None else x / scale * _NUDGE
    first = (bins.low + 127) << bins.fine
    number = (units.view(torch.int32) >> (_MANTISSA - bins.fine)) - first + 1
    number = torch.where(units.isfinite(), number.clamp(1, BINS), -1)
    number = torch.where(x == 0, 0, number)
    with not_strict():  # counts are integers, exact in any order
        return torch.histc(number.double(), BINS + 1, 0, BINS + 1)


def _strides(shape: Sequence[int]) -> list[int]:
    """Odd strides that leave about `SAMPLE` elements, nearly equal along dimensions that are long enough."""
    surplus, wide = math.prod(shape) / SAMPLE, sum(n > 1 for n in shape)
    strides = []
    for n in shape:
        stride = int(max(1.0, min(n, surplus ** (1 / wide)))) if n > 1 else 1
        stride -= stride % 2 == 0
        surplus, wide = surplus / stride, wide - (n > 1)
        strides.append(stride)
    return strides


def _sample(t: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A view of every stride-th element; a dimension of size 1 keeps its element."""
    if not t.ndim:
        return t
    return t[
        tuple(
            slice(s // 2 if n > 1 else 0, None, s if n > 1 else 1)
            for n, s in zip(t.shape, strides, strict=True)
        )
    ]
