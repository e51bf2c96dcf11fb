"""index.json: which file holds which slice of which tensor.

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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from narrowgauge.trainer.checkpoint.store.safetensors_writer import DTYPES
from narrowgauge.trainer.checkpoint.store.slices import Shape, TensorSlice, require_exact_cover

INDEX = "index.json"
SUFFIX = ".safetensors"
VERSION = 1
# safetensors cannot read a slice of FP4 pairs: their bytes are stored, and the index has this dtype.
STORABLE = DTYPES | {"F4": torch.float4_e2m1fn_x2}


@dataclass(frozen=True)
class StoredSlice:
    """A slice in a file of the checkpoint, and its key in that file."""

    file: str
    key: str
    slice: TensorSlice


@dataclass(frozen=True)
class Entry:
    """A stored tensor: its slices, or the name of the tensor that it shares."""

    dtype: str
    shape: Shape
    slices: tuple[StoredSlice, ...]
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
    slices = [
        {"file": s.file, "key": s.key, "offset": s.slice.offset, "size": s.slice.size} for s in entry.slices
    ]
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
        StoredSlice(b["file"], b["key"], TensorSlice(_shape(b["offset"]), _shape(b["size"])))
        for b in content["boxes"]
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
        require_exact_cover(entry.shape, (stored.slice for stored in entry.slices))
    for stored in entry.slices:
        if stored.file not in left:
            raise ValueError(f"{stored.file!r} is not a file of this checkpoint")
        left[stored.file] -= stored.slice.numel * entry.itemsize
        if left[stored.file] < 0 or not stored.slice.numel:
            raise ValueError(f"{stored.file!r} cannot hold a slice of size {stored.slice.size}")
        if (stored.file, stored.key) in seen:
            raise ValueError(f"{stored.key!r} in {stored.file!r} is named twice")
        seen.add((stored.file, stored.key))
