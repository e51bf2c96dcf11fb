"""Amaxes and counts of many sharded tensors, with one collective for all that are sharded alike.

Each rank sees only its shards. The amax of a global tensor is one all-reduce with MAX, a count one with a
sum, and a round trip costs the same for a hundred tensors as for one.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from narrowgauge.collectives import Group, all_reduce_max, all_reduce_sum, local_amax
from narrowgauge.quantization.sharding.shard import TensorShard

Shards = Sequence[TensorShard | None]


def all_reduce_amaxes(tensors: Sequence[torch.Tensor], shards: Shards) -> list[torch.Tensor]:
    """The amax of each global tensor, 0-dim, infinite where a sharded one is not finite.

    Args:
        tensors: The local tensors.
        shards: The shard of each; None for one that is not sharded.
    """
    return _reduce_alike([local_amax(t) for t in tensors], shards, all_reduce_max)


def all_reduce_shares(masks: Iterable[torch.Tensor], shards: Shards) -> list[torch.Tensor]:
    """The fraction of each global tensor's elements for which a bool tensor is true, 0-dim float32.

    Args:
        masks: The local bool tensors, made one at a time.
        shards: The shard of each; None for one that is not sharded.
    """
    counts, sizes = [], []
    for shard, mask in zip(shards, masks, strict=True):
        counts.append(torch.count_nonzero(mask))
        sizes.append(mask.numel() if shard is None else shard.shape.numel())
    totals = _reduce_alike(counts, shards, all_reduce_sum)
    return [total.float() / max(size, 1) for total, size in zip(totals, sizes, strict=True)]


def _reduce_alike(
    values: list[torch.Tensor],
    shards: Shards,
    reduce: Callable[[torch.Tensor, Sequence[Group]], torch.Tensor],
) -> list[torch.Tensor]:
    """Reduce a 0-dim value of each tensor over the ranks that share it, in place in the list."""
    alike: dict[tuple[Group, ...], list[int]] = {}
    for i, shard in enumerate(shards):
        if shard is not None and shard.groups:
            alike.setdefault(tuple(shard.groups), []).append(i)
    for groups, members in alike.items():
        reduced = reduce(torch.stack([values[i] for i in members]), groups)
        for i, value in zip(members, reduced.unbind(), strict=True):
            values[i] = value
    return values
