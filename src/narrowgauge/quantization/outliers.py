"""Outliers apart from the rest: single elements (FP4, arXiv 2501.17116), or whole channels (TetraJet-v2).

**Elements.** A few elements of an activation are much larger than the rest and cost all others their
resolution. x is clamped to its own quantiles 1 - a and a; the small part is quantized, and what was cut off,
a sparse tensor, is multiplied in high precision (`compensate`):

    x = clamp(x) + rest            x @ w  ~  Q(clamp(x)) @ Q(w) + rest @ Q(w)

**Channels.** Where outliers stay in the same few columns of an activation, these columns C are held in a
wider cast P (`keep_channels`, arXiv 2510.27527):

    x = x_C + x_R       x_C: the other columns are zeros; x_R: those of C are
    operand             P(x_C) in the columns of C, Q(x_R) in all others

Blocks and scales of either cast are those of the full tensor with its zeros, so that no process that holds
some columns has to know the others. If x and w are split alike, y = x w^T is the sum of a product in Q and
one in P. C is the share of columns with the largest sums of squares over all rows; of equals, the first.
"""

import torch

from narrowgauge.collectives import all_reduce_sum
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import DEFAULT_CONTEXT, QuantContext
from narrowgauge.quantization.sharding.shard import TensorShard


def clamp_outliers(x: torch.Tensor, quantile: float, context: QuantContext = DEFAULT_CONTEXT) -> torch.Tensor:
    """Clamp a tensor to its quantiles 1 - `quantile` and `quantile`.

    Both are elements of the tensor, no mean of two. Those of a global tensor are found among all its
    elements, which are brought to every process that holds some.
    """
    if context.limits is not None:
        return x.clamp(*context.limits)
    elements = context.global_elements(x.detach())
    if not elements.numel():
        return x
    low, high = ranked(elements, *quantile_ranks(elements.numel(), quantile))
    return x.clamp(low, high)


def quantile_ranks(n: int, quantile: float) -> tuple[int, int]:
    """The ranks, from 0 in ascending order, of the quantiles 1 - `quantile` and `quantile` of n elements."""
    return int((1 - quantile) * n), min(int(quantile * n), n - 1)


def clamped(x: torch.Tensor, cast: Cast, context: QuantContext) -> torch.Tensor:
    """The tensor without its outliers, if the cast clamps them."""
    return clamp_outliers(x, cast.outliers, context) if cast.outliers else x


def squared_norms(x: torch.Tensor, shard: TensorShard | None = None) -> torch.Tensor:
    """The sum of squares of each channel (last dimension) of the global tensor: this process's part, float64.

    The order of a float64 sum over processes decides between two channels by the rarest chance only. A
    channel that is not finite counts as nothing: it breaks its own blocks.
    """
    sums = x.detach().double().square().flatten(0, -2).sum(0)
    sums = torch.where(sums.isfinite(), sums, 0.0)
    if shard is None or not shard.axes[-1].groups:
        return sums
    columns = shard.axes[-1]
    return sums.new_zeros(columns.size).index_copy(0, columns.global_indices.to(x.device), sums)


def kept_count(share: float, channels: int) -> int:
    """How many of so many channels are kept."""
    return max(1, round(share * channels))


def largest_channels(norms: torch.Tensor, share: float) -> torch.Tensor:
    """Which channels are kept, bool, by norms of all of them; none if all are 0."""
    order = torch.sort(norms, descending=True, stable=True).indices[: kept_count(share, len(norms))]
    chosen = torch.zeros_like(norms, dtype=torch.bool).index_fill(0, order, True)
    return chosen & (norms > 0)


def kept_channels(x: torch.Tensor, cast: Cast, context: QuantContext) -> torch.Tensor:
    """Which channels of a local tensor are kept, bool: the given ones, else those of its global tensor."""
    if context.channels is not None:
        return context.channels
    shard = context.shard
    norms = all_reduce_sum(squared_norms(x, shard), [] if shard is None else shard.groups)
    return local_channels(largest_channels(norms, cast.keep_channels), shard)


def local_channels(channels: torch.Tensor, shard: TensorShard | None) -> torch.Tensor:
    """The part of a row of all channels that a local tensor has."""
    if shard is None or not shard.axes[-1].groups:
        return channels
    return channels[shard.axes[-1].global_indices.to(channels.device)]


def parted(x: torch.Tensor, channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the tensor without the kept channels, the tensor with nothing else)."""
    if not may_pick(x):
        return torch.where(channels, 0.0, x), torch.where(channels, x, 0.0)
    columns = channels.nonzero().flatten()
    alone = torch.zeros_like(x).index_copy_(-1, columns, x.index_select(-1, columns))
    return x.clone().index_fill_(-1, columns, 0.0), alone


def joined(rest: torch.Tensor, kept: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Both parts as one tensor, in the wider dtype of the two; `rest` may be overwritten."""
    if not may_pick(rest):
        return torch.where(channels, kept, rest)
    wider, columns = torch.promote_types(rest.dtype, kept.dtype), channels.nonzero().flatten()
    return rest.to(wider).index_copy_(-1, columns, kept.index_select(-1, columns).to(wider))


def may_pick(x: torch.Tensor) -> bool:
    """Whether columns may be picked by number: a GPU's host would wait for them, and a graph has none."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not x.requires_grad


def ranked(x: torch.Tensor, *ranks: int) -> list[torch.Tensor]:
    """The elements of x of given ranks in ascending order (0 the smallest, NaN last): 0-dim, in x's dtype."""
    flat = x.flatten()
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.compiler.is_compiling():
        counts = torch.bincount(flat.view(torch.int16).int().bitwise_and_(0xFFFF), minlength=2**16)
        if not counts[0x7F81:0x8000].any() and not counts[0xFF81:].any():  # no NaN, which no order holds
            return [_from_counts(counts, rank) for rank in ranks]
    flat = flat.float()
    return [(flat.kthvalue(rank + 1).values + 0.0).to(x.dtype) for rank in ranks]  # -0 + 0 = +0


def _from_counts(counts: torch.Tensor, rank: int) -> torch.Tensor:
    """The bfloat16 of a rank, from how often each of the 65,536 bit patterns occurs.

    This is much faster than a selection among millions. Positive numbers are ordered as their bits are,
    negative ones the other way round.
    """
    negative, positive = counts[2**15 :].flip(0), counts[: 2**15]
    position = int(torch.searchsorted(torch.cat([negative, positive]).cumsum(0), rank, right=True))
    word = position - 2**15 if position >= 2**15 else -1 - position
    return torch.tensor(word, dtype=torch.int16).view(torch.bfloat16) + 0.0
