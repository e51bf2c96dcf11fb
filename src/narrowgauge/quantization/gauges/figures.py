"""Measures what a cast did to a tensor, in a few numbers.

Let x be the values before the cast, y those after it (what a GEMM sees, or what is stored), n their count,
and for each block s its scale and m = s * (the element format's largest value). Shares are of n:

    nonfinite    x or y is NaN or infinite; such elements count as 0 below
    zeros        y = 0
    underflow    x != 0 and y = 0; computed as zeros of y minus zeros of x, since no cast makes anything of 0
    largest      |y| >= m (1 - 2^-20): at the largest value, as a block's amax often is
    clipped      |x| > m (1 + 2^-20): did not fit. The 2^-20 allows for the rounding of the scale

With the error e = y - x, and sums over all elements:

    sqnr_db      10 log10(sum x^2 / sum e^2), the signal-to-quantization-noise ratio; None if either sum is 0
    mean_error   sum e / n: rounding is biased where this is far from 0 relative to sqrt(sum e^2) / n
    rms          sqrt(sum x^2 / n)

With a, the amaxes of the blocks:

    amax         [smallest, median, largest]; the last is the tensor's amax. For an even number of blocks the
                 median is the lower of the two in the middle
    binades      up to 16 counts: blocks whose a has the exponent of the largest, one below, ... 15 or more
                 below (or a = 0); trailing zeros are dropped
    scales       [smallest, largest] decoded scale of a block, tensor scale included
    histogram    magnitudes before and after, in units of the scale; narrow formats only

If a cast transforms a tensor (Hadamard), x is the transformed tensor. Clamped outliers belong to x. If a cast
removes the mean over tokens (`center`), x and y exclude it. Channels kept in another cast count toward
nonfinite, zeros, underflow and all sums; everything else describes the remaining channels. Squares of small
values underflow in float32, so x and y are first multiplied by a power of two, which is exact. `gauge`
reduces a tensor to one vector without a GPU sync; `figures` turns the vector into the numbers above.

**The histogram** counts magnitudes in units of their block's scale, where the grid is that of the element
format: 0, 0.5, 1, 1.5, 2, 3, 4 and 6 for E2M1. Bins are numbered from 1 = 2^0; with n bins per octave, bin b
begins at

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
from dataclasses import replace
from typing import Any

import torch

from narrowgauge.formats import Format, require_values
from narrowgauge.quantization.blocks import Blocks, blocks_of, chunks
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import DEFAULT_CONTEXT, QuantContext
from narrowgauge.quantization.gauges.bins import BINS, Bins, bins_of
from narrowgauge.quantization.passes.in_torch import Split
from narrowgauge.quantization.quantize import block_amax, prepared_by, scales_of
from narrowgauge.quantization.state.quantized_state import QuantizedState
from narrowgauge.quantization.transforms import kept_channels, split_channels
from narrowgauge.system.torch_compat import not_strict

BINADES = 16
SAMPLE = 4096  # elements of a histogram, roughly
WIDTH = 2 * (BINS + 1)  # of a histogram in the vector
_SLACK = 2.0**-20  # a grid value may have lost its last bit in the division by its scale
_SUMS = ("nonfinite", "zeros", "zeros_before", "largest", "clipped", "error", "noise", "signal")
_HEAD = ("elements", "factor", "smallest", "median", "amax", "scale_min", "scale_max", *_SUMS)
_WIDE = 3e38  # the largest bf16 and fp32 values: nothing comes near


def gauge_operand(
    x: torch.Tensor,
    y: torch.Tensor,
    cast: Cast,
    axis: int,
    context: QuantContext = DEFAULT_CONTEXT,
) -> torch.Tensor:
    """Gauge a tensor that `emulate` or `quantize` has processed, and its values after that, scales applied.

    A shard is gauged alone, under the scales that it would have by itself, so that no process waits for
    others. The result is a float64 vector, for `figures`.
    """
    require_values(x)
    if not cast.is_scaled:
        return gauge(x, y, blocks_of(x.shape, cast, axis), None, cast.element.max, cast.element)
    context = replace(context, shard=None)
    if cast.keep_channels:
        return _gauge_parts(x, y, cast, axis, context)
    prepared = prepared_by(x, cast, axis, context)
    y = y if prepared.mean is None else y.float() - prepared.mean
    x = prepared.x if prepared.unclamped is None else prepared.unclamped
    blocks = blocks_of(x.shape, cast, axis)  # a transform may have lengthened the axis
    scales = scales_of(Split(blocks.split(prepared.x), blocks, cast, axis, context))
    scale = scales.block if scales.tensor is None else scales.block * scales.tensor
    return gauge(x, y, blocks, scale, cast.element.max, cast.element)


def _gauge_parts(
    x: torch.Tensor, y: torch.Tensor, cast: Cast, axis: int, context: QuantContext
) -> torch.Tensor:
    """The vector of a tensor with kept channels: that of the others, with sums over both."""
    channels = kept_channels(x, cast, context)
    (rest, alone), (y_rest, y_alone) = split_channels(x, channels), split_channels(y, channels)
    vector = gauge_operand(rest, y_rest, cast.of_the_rest, axis, context)
    y_alone = y_alone[tuple(map(slice, x.shape))]  # drop the padding of a transform
    factor = vector[_HEAD.index("factor")].float()
    sums = _sums(alone, y_alone, factor.new_full((), math.inf), factor)
    sums[1:3] -= x.numel()  # each part has zeros in place of the other
    vector[len(_HEAD) - len(_SUMS) : len(_HEAD)] += sums
    return vector


@torch.no_grad()
def gauge_state(x: torch.Tensor, stored: QuantizedState) -> torch.Tensor:
    """Gauge a float32 tensor that was written to quantized state, as a vector for `figures`.

    Range expansion stretches each block to the largest value, so clipping is not counted under it.
    """
    cast, blocks = stored.cast, blocks_of(stored.shape, stored.cast, -1)
    t = {name: tensor.to(x.device) for name, tensor in stored.tensors.items()}
    scale = t.get("scale")
    if "codes" in t:
        block, outer = stored.quantized(t).aligned_scales()
        scale = block * outer
    largest = 1.0 if cast.codebook else math.inf if cast.expand else cast.element.max
    grid = None if cast.codebook or cast.expand else cast.element
    return gauge(x, stored.read(), blocks, scale, largest, grid)


@torch.no_grad()
def gauge(
    x: torch.Tensor,
    y: torch.Tensor,
    blocks: Blocks,
    scale: torch.Tensor | None = None,
    largest: float = math.inf,
    grid: Format | None = None,
) -> torch.Tensor:
    """Gauge a tensor before and after a cast, for `figures`.

    Args:
        x: The tensor before, of any floating dtype.
        y: The tensor after, in the same shape.
        blocks: The blocks of both.
        scale: The float32 scale of each block, inner dimensions kept with size 1; None for 1.
        largest: The largest value of an element.
        grid: The element format, if its values times `scale` are what can be stored; for the histogram.
    """
    split, after = blocks.split(x), blocks.split(y)
    amax = block_amax(split, blocks)
    amax = torch.where(amax.isfinite(), amax, 0.0)
    ends = [amax.amin(), amax.median(), amax.amax()] if amax.numel() else [amax.new_zeros(())] * 3
    exponent = ends[2].frexp().exponent
    factor = torch.exp2(-exponent.clamp(-100, 100).double()).float()
    largest = largest if largest < _WIDE else math.inf
    limit = torch.full_like(amax, largest) if scale is None else scale * largest
    limit = torch.where(limit > 0, limit, torch.inf)
    sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=x.device)
    for before, there, most in chunks(split, after, limit):
        sums += _sums(before, there, most, factor)
    sums[1:3] -= split.numel() - x.numel()  # zeros that pad a ragged edge
    scales = factor.new_ones(1) if scale is None or not scale.numel() else scale
    low, high = (torch.where(scales.isfinite(), scales, end) for end in (torch.inf, -torch.inf))
    elements = torch.full((1,), x.numel(), dtype=torch.float64, device=x.device)
    extremes = torch.stack([factor, *ends, low.amin(), high.amax()]).double()
    bins = torch.zeros(WIDTH, dtype=torch.float64, device=x.device)
    if grid is not None and largest < math.inf:
        bins = _histogram(split, after, scale, grid)
    return torch.cat([elements, extremes, sums, _binades(amax, exponent), bins])


def _sums(x: torch.Tensor, y: torch.Tensor, limit: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The sums of one chunk, float64, in the order of `_SUMS`; `limit` is the largest value of an element."""
    x, y = x.float(), y.float()
    scaled = x * factor
    e = (y * factor).sub_(scaled)
    nonfinite = torch.zeros((), dtype=torch.int64, device=x.device)
    if x.device.type != "cpu" or not bool(e.sum().isfinite()):
        is_finite = x.isfinite() & y.isfinite()
        nonfinite = torch.count_nonzero(~is_finite)
        x, y, scaled, e = (torch.where(is_finite, t, 0.0) for t in (x, y, scaled, e))
    zeros, zeros_before = (t.numel() - torch.count_nonzero(t) for t in (y, x))
    at_largest = torch.count_nonzero(y.abs() >= limit * (1 - _SLACK))
    clipped = torch.count_nonzero(x.abs() > limit * (1 + _SLACK))
    counts = torch.stack([nonfinite, zeros, zeros_before, at_largest, clipped])
    sums = torch.stack([e.sum(), (e * e).sum(), (scaled * scaled).sum()])
    return torch.cat([counts.double(), sums.double()])


def _binades(amax: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """The number of blocks whose amax is 0, 1, ... binades below the tensor's: float64 counts."""
    below = torch.where(amax > 0, exponent - amax.frexp().exponent, BINADES).clamp_(max=BINADES - 1)
    with not_strict():  # counts are integers, exact in any order
        return torch.histc(below.double(), BINADES, 0, BINADES)


def figures(vector: Sequence[float], grid: Format | None = None) -> dict[str, Any]:
    """The vector of `gauge` by name: the figures of the module's docstring, and `elements`.

    With the element format, it includes a `histogram` if `gauge` made one.
    """
    values, binades = dict(zip(_HEAD, vector, strict=False)), vector[len(_HEAD) : len(_HEAD) + BINADES]
    bins = None if grid is None else _counted(vector[-WIDTH:], grid)
    blocks = [int(count) for count in binades]
    while blocks and not blocks[-1]:
        del blocks[-1]
    n, unit = max(values["elements"], 1.0), 1 / values["factor"]
    shares = {key: values[key] / n for key in ("nonfinite", "zeros")}
    shares["underflow"] = (values["zeros"] - values["zeros_before"]) / n
    return {
        "elements": int(values["elements"]),
        **shares,
        "largest": values["largest"] / n,
        "clipped": values["clipped"] / n,
        "sqnr_db": decibels(values["signal"], values["noise"]),
        "mean_error": values["error"] / n * unit,
        "rms": math.sqrt(values["signal"] / n) * unit,
        "amax": [values[key] for key in ("smallest", "median", "amax")],
        "binades": blocks,
        "scales": [values["scale_min"], values["scale_max"]],
        **({} if bins is None else {"histogram": bins}),
    }


def _histogram(
    split: torch.Tensor, after: torch.Tensor, scale: torch.Tensor | None, fmt: Format
) -> torch.Tensor:
    """Count a sample of a split tensor before and after: float64 [WIDTH], for `_counted`."""
    strides, bins = _strides(split.shape), bins_of(fmt)
    unit = None if scale is None else _sample(scale, strides)
    return torch.cat([_count(_sample(t, strides), unit, bins) for t in (split, after)])


def _counted(vector: Sequence[float], fmt: Format) -> dict[str, Any] | None:
    """The counts of `_histogram` as a record; None if it was not called.

    It has `zeros` [before, after], and `before` and `after` for each bin from number `first` on.
    """
    before, after = ([int(n) for n in vector[i : i + BINS + 1]] for i in (0, BINS + 1))
    if not sum(before):
        return None
    held = [i for i in range(1, BINS + 1) if before[i] or after[i]] or [1]
    bins, used = bins_of(fmt), slice(held[0], held[-1] + 1)
    per_octave = 1 << bins.fine
    return {
        "element": fmt.name,
        "per_octave": per_octave,
        "first": bins.low * per_octave + held[0] - 1,
        "zeros": [before[0], after[0]],
        "before": before[used],
        "after": after[used],
    }


def _count(x: torch.Tensor, scale: torch.Tensor | None, bins: Bins) -> torch.Tensor:
    """float64 [BINS + 1]: the number of zeros, then the number of elements in each bin."""
    x = x.float().abs()
    units = x * (1 + _SLACK) if scale is None else x / scale * (1 + _SLACK)
    first = (bins.low + 127) << bins.fine
    number = (units.view(torch.int32) >> (23 - bins.fine)) - first + 1
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
    sizes = zip(t.shape, strides, strict=False)  # a 0-dim tensor has no dimension
    return t[tuple(slice(s // 2, None, s) if n > 1 else slice(None) for n, s in sizes)]


def decibels(signal: float, noise: float) -> float | None:
    """10 log10 of a power ratio; None if either power is 0 or not finite."""
    if not (0 < signal < math.inf and 0 < noise < math.inf):
        return None
    return 10 * math.log10(signal / noise)


def gauge_product(result: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Compare a matmul with the same in high precision: float64 [4], for `cosine_similarity`."""
    a, b = result.double(), exact.double()
    return torch.stack([(a * b).sum(), (a * a).sum(), (b * b).sum(), (a - b).square().sum()])


def cosine_similarity(vector: Sequence[float]) -> dict[str, float | None]:
    """Cosine of the angle between a matmul and the same in high precision, and the SQNR in decibels."""
    dot, narrow, exact, noise = vector
    is_good = 0 < narrow < math.inf and 0 < exact < math.inf
    cosine = dot / math.sqrt(narrow) / math.sqrt(exact) if is_good else None
    return {"cosine": cosine, "sqnr_db": decibels(exact, noise)}
