"""The plan of a save: each rank describes what it holds, and derives the same plan from all descriptions.

A slice that several ranks hold is written by the one that has the least to write so far. Slices that only one
rank holds are assigned first, then the largest. The plan is a pure function, so only the descriptions are
sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.store.index import (
    STORABLE,
    SUFFIX,
    Entry,
    Index,
    LocalTensors,
    Shape,
    StoredSlice,
    TensorSlice,
    require_exact_cover,
)
from narrowgauge.trainer.checkpoint.store.manifest import plain_name

_NAMES = {dtype: name for name, dtype in STORABLE.items()}
_MISTAKE = "this is a mistake of the program that saves"


@dataclass(frozen=True)
class LocalEntry:
    """Description of what one rank holds of one tensor; empty slices are left out."""

    dtype: str
    shape: Shape
    slices: tuple[TensorSlice, ...]
    same_as: str | None


LocalEntries: TypeAlias = Mapping[str, Mapping[str, LocalEntry]]  # group -> name -> description


def describe(local_tensors: LocalTensors) -> LocalEntries:
    """Describe what this rank holds; a `UserError` if a dtype cannot be stored or slices differ in it."""
    entries: dict[str, dict[str, LocalEntry]] = {}
    for group, named in local_tensors.items():
        first: dict[object, str] = {}
        entries[group] = {}
        for name, held in named.items():
            if not held:
                continue
            types = {(_NAMES.get(local.tensor.dtype), tuple(local.shape)) for local in held}
            if len(types) != 1 or (dtype := held[0].tensor.dtype) not in _NAMES:
                raise UserError(
                    f"tensor {name!r} of {group!r} has slices of {sorted(map(str, types))}, and all must "
                    f"be of one shape and one dtype, of {', '.join(STORABLE)}; {_MISTAKE}"
                )
            filled = [local for local in held if local.tensor.numel()]
            slices = tuple(dict.fromkeys(local.slice for local in filled))
            memory = tuple((*types, _identity(local.tensor), local.slice) for local in filled)
            earlier = first.setdefault(memory, name) if memory else name
            same_as = None if earlier == name else earlier
            entries[group][name] = LocalEntry(_NAMES[dtype], tuple(held[0].shape), slices, same_as)
    return entries


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """A key that is equal for two tensors that view the same memory in the same way."""
    storage = (tensor.device, tensor.untyped_storage().data_ptr())
    return (*storage, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def make_index(ranks: Sequence[LocalEntries]) -> Index:
    """Decide which rank writes which slice, from the descriptions of all ranks, in order."""
    index: dict[str, dict[str, Entry]] = {}
    held: list[tuple[int, int, str, str, TensorSlice, list[int]]] = []
    for group in dict.fromkeys(group for rank in ranks for group in rank):
        assert plain_name(group), f"{group!r} cannot be a file's name"
        index[group] = {}
        for name in dict.fromkeys(name for rank in ranks for name in rank.get(group, {})):
            by_rank = {r: rank[group][name] for r, rank in enumerate(ranks) if name in rank.get(group, {})}
            entry, holders = _merge(group, name, by_rank)
            index[group][name] = entry
            for s, who in holders.items():
                held.append((len(who), -s.numel * entry.itemsize, group, name, s, who))
    load = [0] * len(ranks)  # bytes that each rank has to write
    stored: dict[tuple[str, str], list[StoredSlice]] = {}
    for _, minus_bytes, group, name, s, who in sorted(held):  # those without a choice, then the largest
        rank = min(who, key=lambda r: load[r])
        load[rank] -= minus_bytes
        is_full = s.size == index[group][name].shape
        key = name if is_full else f"{name}@{','.join(map(str, s.offset))}"
        file = file_name(group, rank, len(ranks))
        stored.setdefault((group, name), []).append(StoredSlice(file, key, s))
    return {
        group: {
            name: replace(entry, slices=tuple(stored.get((group, name), ()))) for name, entry in named.items()
        }
        for group, named in index.items()
    }


def file_name(group: str, rank: int, ranks: int) -> str:
    """The name of a rank's file for a group."""
    return f"{group}{SUFFIX}" if ranks == 1 else f"{group}-{rank + 1:05}-of-{ranks:05}{SUFFIX}"


def _merge(
    group: str, name: str, by_rank: Mapping[int, LocalEntry]
) -> tuple[Entry, dict[TensorSlice, list[int]]]:
    """The entry of a tensor, and the ranks that hold each slice; none for a second name of a tensor."""
    types = {(local.dtype, local.shape) for local in by_rank.values()}
    if len(types) > 1:
        raise UserError(
            f"tensor {name!r} of {group!r} is {' and '.join(map(str, sorted(types)))} on different ranks, "
            f"and it must be the same on all; {_MISTAKE}"
        )
    entry = Entry(*types.pop(), slices=())
    first_names = {local.same_as for local in by_rank.values() if local.slices}
    if len(first_names) == 1 and (first := first_names.pop()) is not None:
        return replace(entry, same_as=first), {}
    holders: dict[TensorSlice, list[int]] = {}
    for rank, local in by_rank.items():
        for s in local.slices:
            holders.setdefault(s, []).append(rank)
    try:
        require_exact_cover(entry.shape, holders)
    except ValueError as error:
        raise UserError(f"tensor {name!r} of {group!r} cannot be saved: {error}; {_MISTAKE}") from None
    return entry, holders


def plan_for_rank(
    index: Index, local_tensors: LocalTensors, rank: int, ranks: int
) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors that a rank has to write, by key, for each group that it has a file of."""
    plan: dict[str, dict[str, torch.Tensor]] = {}
    for group, named in index.items():
        file = file_name(group, rank, ranks)
        for name, entry in named.items():
            for stored in entry.slices:
                if stored.file == file:
                    tensors = plan.setdefault(group, {})
                    assert stored.key not in tensors, f"two tensors are called {stored.key!r}"
                    held = local_tensors[group][name]
                    tensors[stored.key] = next(local.tensor for local in held if local.slice == stored.slice)
    return plan
