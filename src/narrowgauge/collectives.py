"""Two collectives of torch whatever they are called: torch 2.13 renamed them, and warns of the old names."""

import torch
import torch.distributed as dist

Group = dist.ProcessGroup

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_rows(row: torch.Tensor, group: Group) -> torch.Tensor:
    """The rows (n,) of all ranks, (ranks, n)."""
    every = row.new_empty(group.size() * len(row))
    _gather(every, row, group=group)
    return every.view(group.size(), -1)


def reduce_scatter_rows(rows: torch.Tensor, group: Group) -> torch.Tensor:
    """Of (ranks, n) on every rank the sum of the rows of this one, (n,), in torch's own arithmetic."""
    own = rows.new_empty(rows.shape[1])
    _scatter(own, rows.reshape(-1), group=group)
    return own
