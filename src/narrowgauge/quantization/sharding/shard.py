"""The position of a local tensor in the global one, when several ranks share the tensor.

Blocks and scales are laid out on the global tensor, so that sharding never changes a value. A rank needs
little for that: the amax of a block that it shares with other ranks (one all-reduce with MAX), and the global
index of each of its elements, because random bits are a function of that index.

    ShardAxis      one dimension of the global tensor: its local segments, and the ranks that share it
    TensorShard    an axis for each dimension; None means a tensor that one rank holds alone

A shard is the Cartesian product of its axes: rows {0 1 6 7} and columns {4 .. 7} are 16 elements. Rows may
come in several segments, as in a fused [q | k | v] where each rank holds some heads of each.

The amax of a global tensor is one all-reduce with MAX, a count one with a sum, and a round trip costs the
same for a hundred tensors as for one: `all_reduce_amaxes` and `all_reduce_shares` make one for all that are
sharded alike.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist

from narrowgauge.formats import RandomStream
from narrowgauge.quantization.cast import Cast
from narrowgauge.system.collectives import Group, all_reduce_max, all_reduce_sum, comm_tag, local_amax
from narrowgauge.system.errors import UserError


@dataclass(frozen=True, eq=False)
class ShardAxis:
    """The local entries of one dimension of a global tensor.

    Attributes:
        size: The number of entries of the dimension in the global tensor.
        segments: (start, length) of each run of consecutive global entries, ascending, in local order.
        groups: The process groups that together hold all entries; one for each mesh axis that shards them.
    """

    size: int
    segments: tuple[tuple[int, int], ...]
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def length(self) -> int:
        """Number of local entries."""
        return sum(length for _, length in self.segments)

    @cached_property
    def global_indices(self) -> torch.Tensor:
        """Index of each local entry in the global dimension, int64, on the CPU."""
        pieces = [torch.arange(a, a + n, device="cpu") for a, n in self.segments]
        return torch.cat(pieces or [torch.arange(0, device="cpu")])

    def is_aligned_to(self, block: int) -> bool:
        """Whether each block of `block` global entries is entirely local or entirely remote."""
        *others, last = self.segments or ((0, 0),)
        ends = last[0] + last[1] == self.size or last[1] % block == 0
        return ends and last[0] % block == 0 and all(a % block == 0 == n % block for a, n in others)

    def in_blocks(self, block: int) -> "ShardAxis":
        """The local blocks of `block` entries (0: one block of all), as entries of the block grid."""
        if not block:
            return full_axis(1)
        segments = tuple((a // block, -(-n // block)) for a, n in self.segments)
        return ShardAxis(-(-self.size // block), segments, self.groups)

    def chunk(self, rank: int, ranks: int, *group: dist.ProcessGroup) -> "ShardAxis":
        """The chunk of `rank` when these entries are divided over `ranks` as `torch.chunk` divides them.

        Without the process `group` of these ranks the result is arithmetic only.
        """
        chunk_length = -(-self.length // ranks)
        begin, end = min(rank * chunk_length, self.length), min((rank + 1) * chunk_length, self.length)
        segments, passed = [], 0
        for a, n in self.segments:
            low, high = max(begin - passed, 0), min(end - passed, n)
            if low < high:
                segments.append((a + low, high - low))
            passed += n
        return ShardAxis(self.size, tuple(segments), (*self.groups, *group))


def full_axis(size: int) -> ShardAxis:
    """An axis that is not sharded."""
    return ShardAxis(size, ((0, size),), ())


@dataclass(frozen=True, eq=False)
class TensorShard:
    """The position of a local tensor in a global one."""

    axes: tuple[ShardAxis, ...]  # one for each dimension
    global_amax: torch.Tensor | None = None  # 0-dim float32, of the global tensor, if it is already known

    @property
    def shape(self) -> torch.Size:
        """Shape of the global tensor."""
        return torch.Size(axis.size for axis in self.axes)

    @property
    def local_shape(self) -> torch.Size:
        """Shape of the local tensor."""
        return torch.Size(axis.length for axis in self.axes)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups over which the tensor is sharded."""
        return [group for axis in self.axes for group in axis.groups]

    @property
    def is_full(self) -> bool:
        """Whether the local tensor is the global one."""
        return not self.groups

    @property
    def shard_count(self) -> int:
        """Number of shards of the global tensor."""
        return prod(group.size() for group in self.groups)

    def reduce_amax(self, amax: torch.Tensor, cast: Cast, axis: int) -> torch.Tensor:
        """The amaxes of a cast's blocks over all ranks, from those of the local elements.

        NaN and infinity become infinity where ranks share a block. `axis` is the contracted dimension.
        """
        if cast.block is None and self.global_amax is not None:
            return self.global_amax.expand_as(amax)
        groups: list[dist.ProcessGroup] = []
        for dim in range(len(self.axes)):
            if extent := self._extent(cast, dim, axis):
                self.require_aligned(extent, dim, cast, "blocks")
            else:
                groups += self.axes[dim].groups
        return all_reduce_max(amax, groups)

    def require_aligned(self, size: int, axis: int, cast: Cast, what: str = "transforms") -> None:
        """Refuse transforms of `size` elements along an axis if a rank boundary would divide one."""
        whole = self.axes[axis]
        if whole.groups and not whole.is_aligned_to(size):
            raise UserError(
                f"cast {cast.name!r} has {what} of {size}, and dividing {whole.size} entries over the ranks "
                "would cut some of them; use fewer ranks on that axis of [parallel], or other dimensions"
            )

    def global_indices(self, device: torch.device | str) -> torch.Tensor:
        """Row-major index of each local element in the global tensor, int64 of the local shape."""
        index = torch.zeros((), dtype=torch.int64, device=device)
        for axis in self.axes:
            index = index[..., None] * axis.size + axis.global_indices.to(device)
        return index

    def bits_of(self, stream: RandomStream) -> RandomStream | torch.Tensor:
        """The stream from the first local element on; its values if the elements are not consecutive."""
        if self.local_shape == self.shape:
            return stream
        first, *others = self.axes
        if len(first.segments) == 1 and all(not axis.groups for axis in others):
            return stream.from_element(first.segments[0][0] * prod(axis.size for axis in others))
        return stream.uniform_at(self.global_indices(stream.key.device))

    def grid(self, cast: Cast, axis: int) -> "TensorShard":
        """The position of the local blocks in the grid of all blocks of a cast."""
        return TensorShard(tuple(a.in_blocks(self._extent(cast, d, axis)) for d, a in enumerate(self.axes)))

    def all_gather_flat(self, x: torch.Tensor) -> torch.Tensor:
        """All elements of the global tensor on every rank, in no particular order, as one row."""
        x = x.flatten()
        for group in self.groups:
            with comm_tag("activations"):
                sizes = torch.zeros(group.size(), dtype=torch.int64, device=x.device)
                sizes[group.rank()] = x.numel()
                dist.all_reduce(sizes, group=group)
                # The memory estimate has no sizes to read: its shards are all alike.
                counts = [x.numel()] * group.size() if x.is_meta else sizes.tolist()
                shards = [x.new_empty(n) for n in counts]
                dist.all_gather(shards, x.contiguous(), group=group)
            x = torch.cat(shards)
        return x

    def full_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """Reassemble the global tensor from the local float tensors, on every rank that holds a shard."""
        if self.is_full:
            return x
        full = x.new_zeros(self.shape)
        full[self._index(x.device)] = x
        for group in self.groups:
            dist.all_reduce(full, group=group)
        return full

    def local_of(self, full: torch.Tensor) -> torch.Tensor:
        """The local part of a global tensor; a tensor of the local shape is that already."""
        return full if full.shape == self.local_shape else full[self._index(full.device)]

    def _extent(self, cast: Cast, dim: int, axis: int) -> int:
        """Entries of a block along a dimension, 0 for all; a block lies in one matrix of several."""
        is_of_blocks = cast.block is None or dim >= len(self.axes) - 2
        return (cast.block or (0, 0))[dim == axis % len(self.axes)] if is_of_blocks else 1

    def _index(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        dims = range(len(self.axes))
        return tuple(
            axis.global_indices.to(device).view([-1 if d == dim else 1 for d in dims])
            for dim, axis in enumerate(self.axes)
        )


Shards = Sequence[TensorShard | None]


def all_reduce_amaxes(tensors: Sequence[torch.Tensor], shards: Shards) -> list[torch.Tensor]:
    """The amax of each global tensor, 0-dim, infinite where a sharded one is not finite."""
    return _reduce_alike([local_amax(t) for t in tensors], shards, all_reduce_max)


def all_reduce_shares(masks: Iterable[torch.Tensor], shards: Shards) -> list[torch.Tensor]:
    """The fraction of each global tensor's elements for which a bool tensor, made when needed, is true."""
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
