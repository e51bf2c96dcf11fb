"""Where a local tensor lies in a global one, when several processes hold a tensor together.

Blocks and scales are laid on the global tensor, so that sharding never changes a number. What a process needs
for that is little: the largest magnitude of a block that it shares with others (one all-reduce with MAX), and
the place of each of its elements in the global tensor, of which random bits are a function.

    Axis     one dimension of the global tensor: the runs of it that lie here, and with whom it is shared
    Part     an axis for each dimension; None for one that lies here whole

A part is a product of its axes: rows {0 1 6 7} and columns {4 .. 7} are 16 elements. Rows may come in several
runs, as those of a fused [q | k | v] do, of which each process holds some heads of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist

from narrowgauge.errors import UserError
from narrowgauge.formats import RandomStream
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.purpose import comm_tag


@dataclass(frozen=True, eq=False)
class ShardAxis:
    """The entries of one dimension of a global tensor that lie here.

    Attributes:
        size: of the dimension in the global tensor.
        runs: (start, length) of each run of entries, ascending, in the order in which they lie here.
        groups: the groups of processes that together hold all entries; one for each way it is divided.
    """

    size: int
    runs: tuple[tuple[int, int], ...]
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def length(self) -> int:
        """How many entries lie here."""
        return sum(length for _, length in self.runs)

    @cached_property
    def positions(self) -> torch.Tensor:
        """The place of each entry in the global dimension, int64, on the CPU."""
        return torch.cat(
            [torch.arange(a, a + n) for a, n in self.runs] or [torch.zeros(0, dtype=torch.int64)]
        )

    def holds_whole(self, block: int) -> bool:
        """Whether blocks of so many entries, laid on the global dimension, are nowhere cut."""
        *others, last = self.runs or ((0, 0),)
        ends = last[0] + last[1] == self.size or last[1] % block == 0
        return ends and last[0] % block == 0 and all(a % block == 0 == n % block for a, n in others)

    def rows(self, rank: int, size: int, *group: dist.ProcessGroup) -> "ShardAxis":
        """The entries that process `rank` of `size` gets when these are cut as `torch.chunk` cuts them.

        `group` has those processes; without one it is arithmetic only.
        """
        each = -(-self.length // size)
        begin, end = min(rank * each, self.length), min((rank + 1) * each, self.length)
        runs, passed = [], 0
        for a, n in self.runs:
            low, high = max(begin - passed, 0), min(end - passed, n)
            if low < high:
                runs.append((a + low, high - low))
            passed += n
        return ShardAxis(self.size, tuple(runs), (*self.groups, *group))


def full_axis(size: int) -> ShardAxis:
    """An axis that nobody else has entries of."""
    return ShardAxis(size, ((0, size),), ())


@dataclass(frozen=True, eq=False)
class TensorShard:
    """A local tensor as part of a global one: an axis for each dimension.

    `agreed` is its largest magnitude, where all have found it already (`agreement`).
    """

    axes: tuple[ShardAxis, ...]
    agreed: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Of the global tensor."""
        return torch.Size(axis.size for axis in self.axes)

    @property
    def local_shape(self) -> torch.Size:
        """Of what lies here."""
        return torch.Size(axis.length for axis in self.axes)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups that hold the tensor together."""
        return [group for axis in self.axes for group in axis.groups]

    @property
    def is_whole(self) -> bool:
        """Whether all of it lies here."""
        return not self.groups

    @property
    def pieces(self) -> int:
        """Into how many pieces the global tensor is divided."""
        return prod(group.size() for group in self.groups)

    def reduce_amax(self, amax: torch.Tensor, cast: Cast, axis: int) -> torch.Tensor:
        """The largest magnitudes of blocks that others hold elements of, too; other blocks stay as they are.

        A NaN or an infinity comes back as infinity.

        Raises:
            UserError: a block of a size of its own is cut.
        """
        if cast.block is None and self.agreed is not None:
            return self.agreed.expand_as(amax)
        shared: list[dist.ProcessGroup] = []
        for dim, own in enumerate(self.axes):
            extent = _extent(cast, dim == axis % len(self.axes))
            if own.groups and extent == 0:
                shared += own.groups
            elif own.groups and not own.holds_whole(extent):
                raise _cut(own, f"blocks of {extent}", cast)
        return all_reduce_amax(amax, shared)

    def require_groups_of(self, size: int, axis: int, cast: Cast) -> None:
        """Refuse a transform of `size` elements along an axis where one would be cut."""
        if self.axes[axis].groups and not self.axes[axis].holds_whole(size):
            raise _cut(self.axes[axis], f"transforms of {size}", cast)

    def require_whole(self, cast: Cast) -> None:
        """Refuse a division of the last dimension that would cut blocks of a cast of state."""
        assert cast.block is not None
        extent = cast.block[1]
        if self.axes[-1].groups and (extent == 0 or not self.axes[-1].holds_whole(extent)):
            raise _cut(self.axes[-1], f"blocks of {extent or self.axes[-1].size}", cast)

    def places(self, device: torch.device | str) -> torch.Tensor:
        """The number of each element in the global tensor, in row-major order: int64 of the local shape."""
        index = torch.zeros((), dtype=torch.int64, device=device)
        for axis in self.axes:
            index = index[..., None] * axis.size + axis.positions.to(device)
        return index

    def bits_of(self, stream: RandomStream) -> RandomStream | torch.Tensor:
        """The stream, or its numbers for the elements that lie here where they do not follow each other."""
        if self.is_whole:
            return stream
        first, *others = self.axes
        if len(first.runs) == 1 and all(not axis.groups for axis in others):
            return stream.from_element(first.runs[0][0] * prod(axis.size for axis in others))
        return stream.uniform_at(self.places(stream.key.device))

    def all_gather_flat(self, x: torch.Tensor) -> torch.Tensor:
        """All elements of the global tensor, in no particular order, as one row."""
        x = x.flatten()
        for group in self.groups:
            pieces = [torch.empty(0, dtype=x.dtype, device=x.device)] * group.size()
            sizes = torch.zeros(group.size(), dtype=torch.int64, device=x.device)
            sizes[group.rank()] = x.numel()
            dist.all_reduce(sizes, group=group)
            pieces = [x.new_empty(int(n)) for n in sizes]
            dist.all_gather(pieces, x.contiguous(), group=group)
            x = torch.cat(pieces)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The global tensor of a float tensor, on every process that holds a piece."""
        if self.is_whole:
            return x
        full = x.new_zeros(self.shape)
        full[self._index(x.device)] = x
        for group in self.groups:
            dist.all_reduce(full, group=group)
        return full

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """What lies here of a global tensor."""
        return full if self.is_whole else full[self._index(full.device)]

    def _index(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        dims = range(len(self.axes))
        return tuple(
            axis.positions.to(device).view([-1 if d == dim else 1 for d in dims])
            for dim, axis in enumerate(self.axes)
        )


def all_reduce_amax(amax: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """The largest of all processes of the groups, element by element; what is not finite is infinite.

    MAX of a NaN is defined differently by every backend, that of an infinity by none.
    """
    if groups:
        amax = torch.where(amax.isfinite(), amax, torch.inf)
        with comm_tag("amax"):
            for group in groups:
                dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    return amax


def _extent(cast: Cast, is_contracted: bool) -> int:
    """Entries of a block along a dimension, 0 for all."""
    return 0 if cast.block is None else cast.block[1 if is_contracted else 0]


def _cut(axis: ShardAxis, what: str, cast: Cast) -> UserError:
    return UserError(
        f"cast {cast.name!r} has {what}, and dividing {axis.size} entries over the processes would cut some; "
        "use fewer processes in that direction of [parallel], or other dimensions"
    )
