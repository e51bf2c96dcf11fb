"""Where does the part of a tensor that one process holds lie in the whole?

A *box* is an offset and a size along each dimension. A tensor cut over processes is a set of boxes that
do not overlap and leave no hole, however it was cut: by rows, by columns, both, evenly or not.

       0   2       6
     0 +---+-------+      offset (0, 0) size (2, 2)      offset (0, 2) size (2, 4)
     2 +---+---+---+
     3 +-------+---+      offset (2, 0) size (1, 4)      offset (2, 4) size (1, 2)

A checkpoint stores boxes, and says which. Whoever reads it wants other boxes: each wanted box is put together
from its overlaps with the stored ones. A scalar is one box without dimensions.
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
    def volume(self) -> int:
        """Elements."""
        return prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.size, strict=True))

    def overlap(self, other: "TensorSlice") -> "TensorSlice | None":
        """What two boxes of one tensor have in common; None where that is nothing."""
        begin = tuple(map(max, self.offset, other.offset))
        ends = zip(self.offset, self.size, other.offset, other.size, strict=True)
        end = tuple(min(a + n, b + m) for a, n, b, m in ends)
        common = TensorSlice(begin, tuple(e - b for b, e in zip(begin, end, strict=True)))
        return common if all(n > 0 for n in common.size) else None

    def within(self, frame: "TensorSlice") -> "TensorSlice":
        """The same box, counted from where `frame` begins."""
        return TensorSlice(tuple(a - b for a, b in zip(self.offset, frame.offset, strict=True)), self.size)


@dataclass(frozen=True)
class LocalTensor:
    """What one process holds of a tensor.

    Attributes:
        tensor: the part itself, on any device, with any strides.
        shape: of the whole tensor.
        offset: where the part begins in it, an index for each dimension.
    """

    tensor: torch.Tensor
    shape: Shape
    offset: Shape

    @property
    def box(self) -> TensorSlice:
        """Where the part lies."""
        return TensorSlice(tuple(self.offset), tuple(self.tensor.shape))


LocalTensors: TypeAlias = Mapping[
    str, Mapping[str, Sequence[LocalTensor]]
]  # group -> name -> pieces held here


def full_tensor(tensor: torch.Tensor) -> LocalTensor:
    """A tensor that one process holds all of."""
    return LocalTensor(tensor, tuple(tensor.shape), (0,) * tensor.ndim)


def require_exact_cover(shape: Shape, boxes: Iterable[TensorSlice]) -> None:
    """Check that boxes fill a shape, each element once. Raises `ValueError` with what is wrong."""
    boxes = [box for box in boxes if box.volume]
    for box in boxes:
        require_inside(shape, box)
    if pair := _overlapping(boxes, len(shape)):
        raise ValueError(f"the pieces at {pair[0].offset} and {pair[1].offset} overlap")
    if missing := prod(shape) - sum(box.volume for box in boxes):
        raise ValueError(f"no piece holds {missing} of the {prod(shape)} elements of its shape {shape}")


def require_inside(shape: Shape, box: TensorSlice) -> None:
    """Check that a box is a part of a shape. Raises `ValueError` with what is wrong."""
    dimensions = len(box.offset) == len(box.size) == len(shape)
    if not dimensions or any(
        o < 0 or n < 0 or o + n > s for o, n, s in zip(box.offset, box.size, shape, strict=True)
    ):
        raise ValueError(f"a piece at {box.offset} of size {box.size} reaches beyond its shape {shape}")


def _overlapping(boxes: list[TensorSlice], dimensions: int) -> tuple[TensorSlice, TensorSlice] | None:
    """Two boxes that overlap: a sweep along the dimension that is cut most."""
    if dimensions == 0:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    along = max(range(dimensions), key=lambda d: len({box.offset[d] for box in boxes}))
    open_boxes: list[TensorSlice] = []  # that reach to where the sweep is
    for box in sorted(boxes, key=lambda box: box.offset[along]):
        open_boxes = [b for b in open_boxes if b.offset[along] + b.size[along] > box.offset[along]]
        for other in open_boxes:
            if box.overlap(other):
                return other, box
        open_boxes.append(box)
    return None
