"""Which file holds which part of which tensor: index.json.

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

A second name of one tensor (a tied head) is stored as a name. One process writes one file a group, and each
tensor in one part. The index is not trusted: `from_json` says what it has to be.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from narrowgauge.checkpoint.store.safetensors_writer import DTYPES
from narrowgauge.checkpoint.store.slices import Shape, TensorSlice, require_exact_cover

INDEX = "index.json"
SUFFIX = ".safetensors"
VERSION = 1
# FP4 pairs have no slices in safetensors: their bytes are stored, and this name stands in the index.
STORABLE = DTYPES | {"F4": torch.float4_e2m1fn_x2}


@dataclass(frozen=True)
class StoredSlice:
    """A stored box: its file, and its name there."""

    file: str
    key: str
    box: TensorSlice


@dataclass(frozen=True)
class Entry:
    """A stored tensor: its parts, or the name whose tensor it is too."""

    dtype: str
    shape: Shape
    parts: tuple[StoredSlice, ...]
    same_as: str | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return STORABLE[self.dtype].itemsize


Index: TypeAlias = Mapping[str, Mapping[str, Entry]]  # group -> name -> entry


def to_json(index: Index) -> str:
    """The text of index.json."""
    groups = {g: {name: _as_json(entry) for name, entry in named.items()} for g, named in index.items()}
    return json.dumps({"groups": groups, "version": VERSION}, indent=1) + "\n"


def _as_json(entry: Entry) -> dict[str, object]:
    if entry.same_as is not None:
        return {"same_as": entry.same_as}
    boxes = [{"file": p.file, "key": p.key, "offset": p.box.offset, "size": p.box.size} for p in entry.parts]
    return {"boxes": boxes, "dtype": entry.dtype, "shape": entry.shape}


def from_json(content: Mapping[str, Any], sizes: Mapping[str, int]) -> Index:
    """Read an index that is not trusted.

    Args:
        content: of index.json.
        sizes: of the checkpoint's other files, in bytes, by name.

    Every tensor must be covered exactly by parts in those files, every part be there once, every file be
    named, and no file be asked for more than it has: that bounds the memory that a forged index can take.

    Raises `ValueError` with what is wrong.
    """
    if type(content["version"]) is not int or content["version"] > VERSION:
        raise ValueError(f"version {content['version']!r}, and this narrowgauge reads up to {VERSION}")
    index = {g: {name: _entry(named, name) for name in named} for g, named in content["groups"].items()}
    left = dict(sizes)
    seen: set[tuple[str, str]] = set()
    for group, named in index.items():
        for name, entry in named.items():
            try:
                _check_parts(entry, left, seen)
            except ValueError as error:
                raise ValueError(f"{name!r} of {group!r}: {error}") from None
    if strange := sizes.keys() - {file for file, _ in seen}:
        raise ValueError(f"it names no part in {min(strange)!r}")
    return index


def _entry(named: Mapping[str, Any], name: str) -> Entry:
    """The record behind parsed JSON."""
    first = named[name].get("same_as")
    content = named[name] if first is None else named[first]
    if content["dtype"] not in STORABLE or "same_as" in content:
        raise ValueError(f"dtype or same_as of {name!r}")
    parts = [
        StoredSlice(b["file"], b["key"], TensorSlice(_shape(b["offset"]), _shape(b["size"])))
        for b in content["boxes"]
    ]
    if not all(isinstance(text, str) for part in parts for text in (part.file, part.key)):
        raise ValueError(f"file or key of {name!r}")
    return Entry(content["dtype"], _shape(content["shape"]), () if first is not None else tuple(parts), first)


def _shape(numbers: Any) -> Shape:
    if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{numbers!r} is no shape")
    return tuple(numbers)


def _check_parts(entry: Entry, left: dict[str, int], seen: set[tuple[str, str]]) -> None:
    """Check one entry against the bytes that files have left and the parts that are taken."""
    if entry.same_as is None:
        require_exact_cover(entry.shape, (part.box for part in entry.parts))
    for part in entry.parts:
        if part.file not in left:
            raise ValueError(f"{part.file!r} is no file of this checkpoint")
        left[part.file] -= part.box.volume * entry.itemsize
        if left[part.file] < 0 or not part.box.volume:
            raise ValueError(f"{part.file!r} cannot hold a part of size {part.box.size}")
        if (part.file, part.key) in seen:
            raise ValueError(f"{part.key!r} in {part.file!r} is named twice")
        seen.add((part.file, part.key))
