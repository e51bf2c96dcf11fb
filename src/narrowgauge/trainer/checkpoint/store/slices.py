"""Slices of a tensor: where the part held by one process lies in the global tensor.

A *slice* is an offset and a size along each dimension. A tensor sharded over processes is a set of slices
that do not overlap and leave no hole, however it was cut: by rows, by columns, both, evenly or not.

       0   2       6
     0 +---+-------+      offset (0, 0) size (2, 2)      offset (0, 2) size (2, 4)
     2 +---+---+---+
     3 +-------+---+      offset (2, 0) size (1, 4)      offset (2, 4) size (1, 2)

A checkpoint stores slices and their positions. A reader needs other slices: each is assembled from its
overlaps with the stored ones. A scalar is one slice without dimensions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, order=True)
class TensorSlice:
    """A part of a tensor: `offset[d]` to `offset[d] + size[d]` along dimension d."""

    offset: Shape
    size: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.size)

    @property
    def index(self) -> tuple[slice, ...]:
        """The slice as an index into the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.size, strict=True))

    def overlap(self, other: "TensorSlice") -> "TensorSlice | None":
        """The elements that two slices of one tensor share; None if there are none."""
        begin = tuple(map(max, self.offset, other.offset))
        ends = zip(self.offset, self.size, other.offset, other.size, strict=True)
        end = tuple(min(a + n, b + m) for a, n, b, m in ends)
        common = TensorSlice(begin, tuple(e - b for b, e in zip(begin, end, strict=True)))
        return common if all(n > 0 for n in common.size) else None

    def within(self, frame: "TensorSlice") -> "TensorSlice":
        """The same slice, with offsets relative to the start of `frame`."""
        return TensorSlice(tuple(a - b for a, b in zip(self.offset, frame.offset, strict=True)), self.size)


@dataclass(frozen=True)
class LocalTensor:
    """A slice of a global tensor in the memory of this process."""

    tensor: torch.Tensor  # the elements, on any device, with any strides
    shape: Shape  # shape of the global tensor
    offset: Shape  # index of the first element in the global tensor, for each dimension

    @property
    def slice(self) -> TensorSlice:
        """The position of the elements in the global tensor."""
        return TensorSlice(tuple(self.offset), tuple(self.tensor.shape))


# group -> name -> slices of the tensor that this process holds
LocalTensors: TypeAlias = Mapping[str, Mapping[str, Sequence[LocalTensor]]]


def full_tensor(tensor: torch.Tensor) -> LocalTensor:
    """A tensor that one process holds in full."""
    return LocalTensor(tensor, tuple(tensor.shape), (0,) * tensor.ndim)


def require_exact_cover(shape: Shape, slices: Iterable[TensorSlice]) -> None:
    """Check that slices fill a shape, each element once; a `ValueError` if not."""
    slices = [s for s in slices if s.numel]
    for s in slices:
        require_inside(shape, s)
    if pair := _overlapping(slices, len(shape)):
        raise ValueError(f"the slices at {pair[0].offset} and {pair[1].offset} overlap")
    if missing := prod(shape) - sum(s.numel for s in slices):
        raise ValueError(f"no slice holds {missing} of the {prod(shape)} elements of its shape {shape}")


def require_inside(shape: Shape, tensor_slice: TensorSlice) -> None:
    """Check that a slice lies inside a shape and has its dimensions; a `ValueError` if not."""
    offset, size = tensor_slice.offset, tensor_slice.size
    dimensions = len(offset) == len(size) == len(shape)
    if not dimensions or any(
        o < 0 or n < 0 or o + n > s for o, n, s in zip(offset, size, shape, strict=True)
    ):
        raise ValueError(f"a slice at {offset} of size {size} reaches beyond its shape {shape}")


def _overlapping(slices: list[TensorSlice], dimensions: int) -> tuple[TensorSlice, TensorSlice] | None:
    """Two slices that overlap: a sweep along the dimension that is cut most."""
    if dimensions == 0:
        return (slices[0], slices[1]) if len(slices) > 1 else None
    along = max(range(dimensions), key=lambda d: len({s.offset[d] for s in slices}))
    active: list[TensorSlice] = []  # those that reach the sweep's position
    for s in sorted(slices, key=lambda s: s.offset[along]):
        active = [a for a in active if a.offset[along] + a.size[along] > s.offset[along]]
        for other in active:
            if s.overlap(other):
                return other, s
        active.append(s)
    return None
