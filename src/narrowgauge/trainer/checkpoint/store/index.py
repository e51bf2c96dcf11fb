"""Slices of tensors, and index.json: which file holds which slice of which tensor.

A *slice* is an offset and a size along each dimension. A tensor sharded over processes is a set of slices
that do not overlap and leave no hole, however it was cut: by rows, by columns, both, evenly or not.

       0   2       6
     0 +---+-------+      offset (0, 0) size (2, 2)      offset (0, 2) size (2, 4)
     2 +---+---+---+
     3 +-------+---+      offset (2, 0) size (1, 4)      offset (2, 4) size (1, 2)

A checkpoint stores slices and their positions. A reader needs other slices: each is assembled from its
overlaps with the stored ones. A scalar is one slice without dimensions.

    {
     "groups": {
      "model": {
       "embedding.weight": {
        "boxes": [
         {"file": "model-00001-of-00002.safetensors", "key": "embedding.weight@0,0",
          "offset": [0, 0], "size": [129, 32]},
         {"file": "model-00002-of-00002.safetensors", ...}
        ],
        "dtype": "BF16",
        "shape": [257, 32]
       },
       "head.weight": {"same_as": "embedding.weight"}
      }
     },
     "version": 1
    }

A second name of a tensor (a tied head) is stored as a name. One process writes one file for each group, with
each tensor as one slice. The index is not trusted: `from_json` lists what is checked.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import torch

from narrowgauge.trainer.checkpoint.store.safetensors_writer import DTYPES

INDEX = "index.json"
SUFFIX = ".safetensors"
VERSION = 1
# safetensors cannot read a slice of FP4 pairs: their bytes are stored, and the index has this dtype.
STORABLE = DTYPES | {"F4": torch.float4_e2m1fn_x2}
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, order=True)
class TensorSlice:
    """A part of a tensor: `offset[d]` to `offset[d] + size[d]` along dimension d; and where it is stored."""

    offset: Shape
    size: Shape
    file: str = field(default="", compare=False)  # of the checkpoint
    key: str = field(default="", compare=False)  # in that file

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


@dataclass(frozen=True)
class Entry:
    """A tensor: the slices of it that a checkpoint stores or a rank holds, or the name of its other tensor.

    Attributes:
        dtype: its name in safetensors.
        shape: of the global tensor.
        slices: without empty ones.
        same_as: the first name of the tensor, if this is its second.
    """

    dtype: str
    shape: Shape
    slices: tuple[TensorSlice, ...]
    same_as: str | None = None

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return STORABLE[self.dtype].itemsize


Index: TypeAlias = Mapping[str, Mapping[str, Entry]]  # group -> name -> entry


def to_json(index: Index) -> str:
    """The text of index.json."""
    groups = {g: {name: _as_json(entry) for name, entry in named.items()} for g, named in index.items()}
    return json.dumps({"groups": groups, "version": VERSION}, indent=1) + "\n"


def _as_json(entry: Entry) -> dict[str, object]:
    if entry.same_as is not None:
        return {"same_as": entry.same_as}
    slices = [{"file": s.file, "key": s.key, "offset": s.offset, "size": s.size} for s in entry.slices]
    return {"boxes": slices, "dtype": entry.dtype, "shape": entry.shape}


def from_json(content: Mapping[str, Any], sizes: Mapping[str, int]) -> Index:
    """Read a parsed index that is not trusted; `sizes` are those of the checkpoint's tensor files in bytes.

    Slices in the files must cover every tensor exactly; every slice must be named once and every file at
    least once; and no file may be asked for more bytes than it has, which bounds the memory that a forged
    index can use. A `ValueError` names the broken rule; a `KeyError`, `TypeError` or `AttributeError` means
    that the content has another layout.
    """
    if type(content["version"]) is not int or content["version"] > VERSION:
        raise ValueError(f"version {content['version']!r}, but this narrowgauge reads up to {VERSION}")
    index = {g: {name: _entry(named, name) for name in named} for g, named in content["groups"].items()}
    left = dict(sizes)
    seen: set[tuple[str, str]] = set()
    for group, named in index.items():
        for name, entry in named.items():
            try:
                _check_slices(entry, left, seen)
            except ValueError as error:
                raise ValueError(f"{name!r} of {group!r}: {error}") from None
    if strange := sizes.keys() - {file for file, _ in seen}:
        raise ValueError(f"it names no slice in {min(strange)!r}")
    return index


def _entry(named: Mapping[str, Any], name: str) -> Entry:
    """One record of the parsed JSON."""
    first = named[name].get("same_as")
    content = named[name] if first is None else named[first]
    if content["dtype"] not in STORABLE or "same_as" in content:
        raise ValueError(f"dtype or same_as of {name!r}")
    slices = tuple(
        TensorSlice(_shape(b["offset"]), _shape(b["size"]), b["file"], b["key"]) for b in content["boxes"]
    )
    if not all(isinstance(text, str) for s in slices for text in (s.file, s.key)):
        raise ValueError(f"file or key of {name!r}")
    return Entry(content["dtype"], _shape(content["shape"]), () if first is not None else slices, first)


def _shape(numbers: Any) -> Shape:
    if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{numbers!r} is not a shape")
    return tuple(numbers)


def _check_slices(entry: Entry, left: dict[str, int], seen: set[tuple[str, str]]) -> None:
    """Check one entry against the bytes left in the files and the keys already used."""
    if entry.same_as is None:
        require_exact_cover(entry.shape, entry.slices)
    for stored in entry.slices:
        if stored.file not in left:
            raise ValueError(f"{stored.file!r} is not a file of this checkpoint")
        left[stored.file] -= stored.numel * entry.itemsize
        if left[stored.file] < 0 or not stored.numel:
            raise ValueError(f"{stored.file!r} cannot hold a slice of size {stored.size}")
        if (stored.file, stored.key) in seen:
            raise ValueError(f"{stored.key!r} in {stored.file!r} is named twice")
        seen.add((stored.file, stored.key))
