"""Prepares a tensor for its blocks: the transforms of its cast, and the channels kept in another cast.

`quantize.prepared_by` applies them in turn; `quantize.emulate` adds to an operand what they removed.

    center      x = mean + rest         operand  Q(rest) + mean: the residual has a smaller range than x
    hadamard    x H
    outliers    x = clamp(x) + rest     operand  Q(clamp(x)) + rest

**The Hadamard transform** along a GEMM's contraction spreads outliers and leaves the product unchanged. With
H the Sylvester matrix of size n (H^T H = n I) and D a diagonal of signs, x -> x D H / sqrt(n) is orthogonal,
so transforming both operands along the contraction leaves their product as it was, while one large element
becomes n medium ones that a narrow format represents better. The signs keep the transform from mapping a
constant row to a single spike. For n = 16 they are the fixed ones of TransformerEngine's NVFP4 recipe. The
arithmetic also follows TransformerEngine: x times the matrix in x's dtype, accumulated in fp32.

**The clamp of outliers** (FP4, arXiv 2501.17116): the few elements of an activation much larger than the rest
cost all other elements resolution. x is clamped to its own quantiles 1 - a and a; the clamped part is
quantized, and the remainder, a sparse tensor, is multiplied in high precision (`compensate`):

    x = clamp(x) + rest            x @ w  ~  Q(clamp(x)) @ Q(w) + rest @ Q(w)

**Kept channels**, for activations whose outliers stay in the same few columns C: they are held in a wider
cast P (`keep_channels`; TetraJet-v2, arXiv 2510.27527):

    x = x_C + x_R       x_C: zero outside the columns C; x_R: zero inside them
    operand             P(x_C) in the columns of C, Q(x_R) in all others

Blocks and scales of either cast come from the full tensor with its zeros, so that a process that holds
some columns need not know the others. If x and w are split the same way, y = x w^T is the sum of a matmul in
Q and one in P. C is the given share of columns with the largest sums of squares over all rows; ties go to the
first.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import DEFAULT_CONTEXT, QuantContext
from narrowgauge.quantization.sharding.shard import TensorShard
from narrowgauge.system.collectives import all_reduce_sum
from narrowgauge.system.devices import imagined, is_shape_only
from narrowgauge.system.errors import UserError
from narrowgauge.system.torch_compat import not_strict

# TransformerEngine, custom_recipes/reference_nvfp4.py: one sign vector for every tensor.
SIGNS = {16: (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)}
_KEPT: dict[tuple[Any, ...], torch.Tensor] = {}


class Prepared(NamedTuple):
    """A tensor after the transforms of its cast."""

    x: torch.Tensor  # the tensor that is quantized
    #: The mean that was subtracted, float32, transformed like x; None if none was
    mean: torch.Tensor | None = None
    unclamped: torch.Tensor | None = None  # x before its outliers were clamped; None if they were not


def clamp_outliers(x: torch.Tensor, quantile: float, context: QuantContext = DEFAULT_CONTEXT) -> torch.Tensor:
    """Clamp a tensor to its quantiles 1 - `quantile` and `quantile`.

    Both are elements of the tensor, not interpolated. For a global tensor they are found among all its
    elements, which are gathered on every process that holds some.
    """
    if context.limits is not None:
        return x.clamp(*context.limits)
    elements, shard = x.detach(), context.shard
    elements = elements if shard is None else shard.all_gather_flat(elements)
    if not elements.numel():
        return x
    low, high = ranked(elements, *quantile_ranks(elements.numel(), quantile))
    return x.clamp(low, high)


@cache
def _rows(size: int, signs: tuple[int, ...]) -> list[list[float]]:
    """D H / sqrt(size), row by row: H[i][j] = (-1)^popcount(i & j)."""
    norm = math.sqrt(size)
    return [[sign * (-1) ** (i & j).bit_count() / norm for j in range(size)] for i, sign in enumerate(signs)]


def transform(size: int, signs: torch.Tensor | Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """The matrix D H / sqrt(size) that rows are multiplied by, in the dtype and on the device of `like`."""
    if isinstance(signs, torch.Tensor):
        return signs.to(like.device, like.dtype).unsqueeze(-1) * _constant(size, (1,) * size, like)
    return _constant(size, tuple(signs) or SIGNS.get(size, (1,) * size), like)


def _constant(size: int, signs: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """D H / sqrt(size) for these signs, cached: a copy to a GPU would wait for everything in its queue.

    Tensors without storage, or made by a compiler, belong to their context and are not cached.
    """
    key = (size, signs, like.dtype, like.device, like.is_meta and imagined(like.device))
    is_plain = not torch.compiler.is_compiling() and type(like) in (torch.Tensor, torch.nn.Parameter)
    if is_plain and key in _KEPT:
        return _KEPT[key]
    with torch.inference_mode(False):  # so that any graph may use it
        constant = torch.tensor(_rows(size, signs), dtype=like.dtype, device=like.device)
    if is_plain and type(constant) is torch.Tensor and not is_shape_only(constant):
        _KEPT[key] = constant
    return constant


def hadamard(x: torch.Tensor, size: int, axis: int, signs: torch.Tensor | Sequence[int] = ()) -> torch.Tensor:
    """Transform a tensor along an axis, in groups of `size`, a power of two; in x's dtype.

    `signs` is D, one +1 or -1 for each element of a group; () for the signs of the size. The axis is padded
    with zeros to a multiple of `size`, and keeps that length.
    """
    if size < 2 or size & (size - 1):
        raise UserError(f"a Hadamard transform of size {size}: the size must be a power of two, such as 16")
    matrix = transform(size, signs, x)
    axis %= x.ndim
    if missing := -x.shape[axis] % size:
        x = torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - axis) + [0, missing])
    groups = x.unflatten(axis, (-1, size))
    if axis == x.ndim - 1:
        return (groups @ matrix).flatten(-2)
    # Groups of rows are multiplied from the left, so that no tensor is transposed in memory.
    rows = groups.flatten(axis + 2)
    return (matrix.T @ rows).view(groups.shape).flatten(axis, axis + 1)


def quantile_ranks(n: int, quantile: float) -> tuple[int, int]:
    """The ranks, from 0 in ascending order, of the quantiles 1 - `quantile` and `quantile` of n elements."""
    return int((1 - quantile) * n), min(int(quantile * n), n - 1)


def ranked(x: torch.Tensor, *ranks: int) -> list[torch.Tensor]:
    """The elements of x at given ranks in ascending order (0 the smallest, NaN last): 0-dim, in x's dtype."""
    flat = x.flatten()
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.compiler.is_compiling():
        counts = torch.bincount(flat.view(torch.int16).int().bitwise_and_(0xFFFF), minlength=2**16)
        if not counts[0x7F81:0x8000].any() and not counts[0xFF81:].any():  # no NaN, which no order holds
            return [_from_counts(counts, rank) for rank in ranks]
    flat = flat.float()
    with not_strict():  # the indices differ between runs, the values do not
        values = [flat.kthvalue(rank + 1).values for rank in ranks]
    return [(value + 0.0).to(x.dtype) for value in values]  # -0 + 0 = +0


def _from_counts(counts: torch.Tensor, rank: int) -> torch.Tensor:
    """The bfloat16 of a given rank, from a histogram of all 65,536 bit patterns.

    Much faster than selecting among millions of elements. Positive values are ordered as their bits, negative
    ones in reverse.
    """
    negative, positive = counts[2**15 :].flip(0), counts[: 2**15]
    position = int(torch.searchsorted(torch.cat([negative, positive]).cumsum(0), rank, right=True))
    word = position - 2**15 if position >= 2**15 else -1 - position
    return torch.tensor(word, dtype=torch.int16, device="cpu").view(torch.bfloat16) + 0.0


def squared_norms(x: torch.Tensor, shard: TensorShard | None = None) -> torch.Tensor:
    """The sum of squares of each channel (last dimension) of the global tensor: this process's part, float64.

    The order of a float64 sum over processes almost never decides between two channels. A non-finite channel
    counts as zero: it already invalidates its own blocks.
    """
    sums = x.detach().double().square().flatten(0, -2).sum(0)
    sums = torch.where(sums.isfinite(), sums, 0.0)
    if shard is None or not shard.axes[-1].groups:
        return sums
    columns = shard.axes[-1]
    return sums.new_zeros(columns.size).index_copy(0, columns.global_indices.to(x.device), sums)


def kept_channels(x: torch.Tensor, cast: Cast, context: QuantContext) -> torch.Tensor:
    """Which channels of a local tensor are kept (bool): the given ones, else its global tensor's."""
    if context.channels is not None:
        return context.channels
    shard = context.shard
    norms = all_reduce_sum(squared_norms(x, shard), [] if shard is None else shard.groups)
    return local_channels(largest_channels(norms, cast.keep_channels), shard)


def local_channels(channels: torch.Tensor, shard: TensorShard | None) -> torch.Tensor:
    """The local part of a vector over all channels."""
    if shard is None or not shard.axes[-1].groups:
        return channels
    return channels[shard.axes[-1].global_indices.to(channels.device)]


def kept_count(share: float, channels: int) -> int:
    """The number of channels that are kept."""
    return max(1, round(share * channels))


def largest_channels(norms: torch.Tensor, share: float) -> torch.Tensor:
    """Which channels are kept (bool), from the norms of all channels; none if all norms are 0."""
    order = torch.sort(norms, descending=True, stable=True).indices[: kept_count(share, len(norms))]
    chosen = torch.zeros_like(norms, dtype=torch.bool).index_fill(0, order, True)
    return chosen & (norms > 0)


def split_channels(x: torch.Tensor, channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the tensor without the kept channels, the tensor with only those)."""
    return torch.where(channels, 0.0, x), torch.where(channels, x, 0.0)
