"""What the processes that hold tensors together know of each tensor as a whole: asked for many at once.

Each of them sees a part. The largest magnitude is one all-reduce with MAX, a count one with a sum, and a
round trip costs the same for a hundred tensors as for one.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from narrowgauge.quantization.purpose import comm_tag
from narrowgauge.quantization.sharding.shard import TensorShard, all_reduce_amax


def all_reduce_amaxes(
    tensors: Sequence[torch.Tensor], parts: Sequence[TensorShard | None]
) -> list[torch.Tensor]:
    """The largest magnitude of each whole tensor, of which these are parts: 0-dim, infinite where not finite.

    One collective for all that are divided alike, instead of one for each.
    """
    found = [t.abs().amax() if t.numel() else t.new_zeros(()) for t in tensors]
    return _together(found, parts, all_reduce_amax)


def all_reduce_shares(
    which: Iterable[torch.Tensor], parts: Sequence[TensorShard | None]
) -> list[torch.Tensor]:
    """The share of each whole tensor's elements for which a bool tensor is true, 0-dim float32.

    One collective for all that are divided alike.
    """
    counts, sizes = [], []
    for part, here in zip(parts, which, strict=True):
        counts.append(torch.count_nonzero(here))
        sizes.append(here.numel() if part is None else part.shape.numel())
    totals = _together(counts, parts, _total)
    return [total.float() / max(size, 1) for total, size in zip(totals, sizes, strict=True)]


def _together(
    values: list[torch.Tensor],
    parts: Sequence[TensorShard | None],
    agree: Callable[[torch.Tensor, Sequence[dist.ProcessGroup]], torch.Tensor],
) -> list[torch.Tensor]:
    """What the holders of each whole tensor agree on, from what each of them has: 0-dim tensors."""
    alike: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for i, part in enumerate(parts):
        if part is not None and part.groups:
            alike.setdefault(tuple(part.groups), []).append(i)
    for groups, members in alike.items():
        found = agree(torch.stack([values[i] for i in members]), groups)
        for i, value in zip(members, found.unbind(), strict=True):
            values[i] = value
    return values


def _total(counts: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    with comm_tag("amax"):
        for group in groups:
            dist.all_reduce(counts, group=group)
    return counts
