"""Channels that are kept in another cast, for activations whose outliers stay in the same few columns.

These columns C are held in a wider cast P (`keep_channels`; TetraJet-v2, arXiv 2510.27527):

    x = x_C + x_R       x_C: zero outside the columns C; x_R: zero inside them
    operand             P(x_C) in the columns of C, Q(x_R) in all others

Blocks and scales of either cast come from the full tensor with its zeros, so that a process that holds
some columns need not know the others. If x and w are split the same way, y = x w^T is the sum of a matmul in
Q and one in P. C is the given share of columns with the largest sums of squares over all rows; ties go to the
first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def kept_count(share: float, channels: int) -> int:
    """The number of channels that are kept."""
    return max(1, round(share * channels))


def largest_channels(norms: torch.Tensor, share: float) -> torch.Tensor:
    """Which channels are kept (bool), from the norms of all channels; none if all norms are 0."""
    import torch

    order = torch.sort(norms, descending=True, stable=True).indices[: kept_count(share, len(norms))]
    chosen = torch.zeros_like(norms, dtype=torch.bool).index_fill(0, order, True)
    return chosen & (norms > 0)


def parted(x: torch.Tensor, channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the tensor without the kept channels, the tensor with only those)."""
    import torch

    if not may_pick(x):
        return torch.where(channels, 0.0, x), torch.where(channels, x, 0.0)
    columns = channels.nonzero().flatten()
    alone = torch.zeros_like(x).index_copy_(-1, columns, x.index_select(-1, columns))
    return x.clone().index_fill_(-1, columns, 0.0), alone


def joined(rest: torch.Tensor, kept: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Both parts as one tensor, in the wider of the two dtypes; may overwrite `rest`."""
    import torch

    if not may_pick(rest):
        return torch.where(channels, kept, rest)
    wider, columns = torch.promote_types(rest.dtype, kept.dtype), channels.nonzero().flatten()
    return rest.to(wider).index_copy_(-1, columns, kept.index_select(-1, columns).to(wider))


def may_pick(x: torch.Tensor) -> bool:
    """Whether columns may be selected by index: on a GPU that would sync, and a graph cannot trace it."""
    import torch

    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not x.requires_grad
