"""Blocks of a tensor: which elements share a scale.

Splitting a dimension n into (ceil(n / b), b) is a view, so a block is a set of inner dimensions and its amax
one reduction over them. A ragged edge is padded with zeros, which do not change any maximum. The grid starts
at element (0, 0) of the *global* tensor.

Passes over a large split tensor process it in `chunks`, which bound the memory of temporaries. Chunking never
changes a value; compiled code processes the tensor as one chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import repeat

import torch

from narrowgauge.quantization.cast import Cast
from narrowgauge.system.errors import UserError

CHUNK = 2**25  # elements


@dataclass(frozen=True, slots=True)
class Blocks:
    """A grid of blocks on a tensor."""

    shape: tuple[int, ...]  # of the tensor
    size: tuple[int, ...]  # the extent of a block along each dimension
    grid: tuple[int, ...]  # the number of blocks along each dimension
    inner: tuple[int, ...]  # the dimensions of a split tensor that lie inside a block
    #: The shape of a tensor with one entry per block that broadcasts over a split tensor
    aligned: tuple[int, ...]
    is_ragged: bool  # whether the last block of some dimension is padded
    is_one: bool  # whether there is one block

    @classmethod
    def of(cls, shape: Sequence[int], size: Sequence[int]) -> "Blocks":
        """The blocks of a given size on a tensor; the last along a dimension may extend past the tensor."""
        grid = tuple([-(-n // b) for n, b in zip(shape, size, strict=True)])
        inner: list[int] = []
        aligned: list[int] = []
        for count, b in zip(grid, size, strict=True):
            aligned.append(count)
            if b > 1:
                inner.append(len(aligned))
                aligned.append(1)
        is_ragged = any(g * b != n for g, b, n in zip(grid, size, shape, strict=True))
        return cls(tuple(shape), tuple(size), grid, tuple(inner), tuple(aligned), is_ragged, set(grid) <= {1})

    def grid_dim(self, dim: int) -> int:
        """The dimension of a split tensor that enumerates the blocks along dimension `dim`."""
        return dim + sum(b > 1 for b in self.size[:dim])

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """`x` with every blocked dimension split in two: (blocks, inside the block)."""
        if self.is_ragged:  # F.pad wants (before, after) pairs from the last dimension on
            missing = [g * b - n for g, b, n in zip(self.grid, self.size, self.shape, strict=True)]
            x = torch.nn.functional.pad(x, [n for m in reversed(missing) for n in (0, m)])
        for dim in reversed(range(len(self.size))):
            if self.size[dim] > 1:
                x = x.unflatten(dim, (self.grid[dim], self.size[dim]))
        return x

    def merge(self, y: torch.Tensor) -> torch.Tensor:
        """The inverse of `split`; cuts off padding."""
        if not self.is_ragged:
            return y.reshape(self.shape)
        y = y.reshape([g * b for g, b in zip(self.grid, self.size, strict=True)])
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            return _first_elements(y, list(self.shape))
        return y[tuple(map(slice, self.shape))]

    def align(self, scales: torch.Tensor) -> torch.Tensor:
        """View scales in the shape of the grid so that they broadcast over a split tensor."""
        for dim in self.inner:
            scales = scales.unsqueeze(dim)
        return scales


@torch.library.custom_op("narrowgauge::first_elements", mutates_args=())
def _first_elements(y: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """The first `shape[dim]` elements along each dimension, copied by a single operator of a compiled graph.

    Otherwise Inductor (torch 2.13, CPU) fuses the slice with the loops over blocks, and its C++ omits the
    vector tail: elements of the last, padded block stay uninitialized.
    """
    return y[tuple(map(slice, shape))].clone(memory_format=torch.contiguous_format)


@_first_elements.register_fake
def _(y: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return y.new_empty(shape)


def blocks_of(shape: torch.Size, cast: Cast, axis: int) -> Blocks:
    """The blocks of a cast on a tensor, columns along `axis`, rows along the other of the last two dims."""
    if cast.block is not None and cast.block[0] != 1 and len(shape) < 2:
        rows, columns = cast.block
        raise UserError(f"cast {cast.name!r} has blocks of {rows}x{columns}: it needs a matrix, not a vector")
    return (_blocks_of if torch.compiler.is_compiling() else _kept_blocks)(shape, cast.block, axis)


def _blocks_of(shape: torch.Size, block: tuple[int, int] | None, axis: int) -> Blocks:
    ndim = len(shape)
    if not -ndim <= axis < ndim:
        raise UserError(
            f"axis {axis} of a tensor of shape {tuple(shape)}: it must lie in [{-ndim}, {ndim - 1}]"
        )
    if block is None:  # one block; an empty tensor has one block of padding
        size = [max(n, 1) for n in shape]
        one = Blocks.of(size, size)
        return replace(one, shape=tuple(shape), is_ragged=True) if 0 in shape else one
    axis %= ndim
    rows, columns = block
    size = [1] * ndim
    size[axis] = columns or max(shape[axis], 1)
    if rows != 1:
        size[ndim - 2 if axis == ndim - 1 else ndim - 1] = rows
    return Blocks.of(shape, size)


_kept_blocks = lru_cache(1024)(_blocks_of)  # a model has a few dozen


def chunks(
    split: torch.Tensor, *others: torch.Tensor, in_one: bool = False
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Iterate over the chunks of a split tensor, in element order, with those of others of its dimensions.

    Each is a contiguous range of the elements. One of the others that has size 1 along the dimension that is
    cut, or none, is shared by all chunks.
    """
    elements = max(CHUNK, split.numel() // 64) if split.is_meta else CHUNK  # there only memory matters
    if in_one or torch.compiler.is_compiling() or split.numel() <= elements:
        yield split, *others
        return
    dim = 1 if split.ndim > 1 and split.shape[0] == 1 else 0
    size = max(1, elements * split.shape[dim] // split.numel())
    shared = (repeat(t) if not t.ndim or t.shape[dim] == 1 else t.split(size, dim) for t in others)
    yield from zip(split.split(size, dim), *shared, strict=False)
