"""Who writes what? Each rank describes what it holds; from all descriptions each makes the same plan.

A part that several ranks hold alike is written by one of them, the one that has least to write so far: parts
without a choice go first, then the largest. The plan is a pure function, so nothing is sent but descriptions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from narrowgauge.checkpoint.store.index import STORABLE, SUFFIX, Entry, Index, StoredSlice
from narrowgauge.checkpoint.store.manifest import plain_name
from narrowgauge.checkpoint.store.slices import LocalTensors, Shape, TensorSlice, require_exact_cover
from narrowgauge.errors import UserError

_NAMES = {dtype: name for name, dtype in STORABLE.items()}
_MISTAKE = "this is a mistake of the program that saves"


@dataclass(frozen=True)
class LocalEntry:
    """What one rank holds of one tensor; of boxes without elements, nothing."""

    dtype: str
    shape: Shape
    boxes: tuple[TensorSlice, ...]
    same_as: str | None


LocalEntries: TypeAlias = Mapping[str, Mapping[str, LocalEntry]]


def describe(pieces: LocalTensors) -> LocalEntries:
    """What this rank holds. Raises `UserError` for a dtype that cannot be stored."""
    holding: dict[str, dict[str, LocalEntry]] = {}
    for group, named in pieces.items():
        first: dict[object, str] = {}
        holding[group] = {}
        for name, parts in named.items():
            if not parts:
                continue
            filled = [piece for piece in parts if piece.tensor.numel()]
            kinds = {(_NAMES.get(piece.tensor.dtype), tuple(piece.shape)) for piece in parts}
            if len(kinds) != 1 or (dtype := parts[0].tensor.dtype) not in _NAMES:
                raise UserError(
                    f"tensor {name!r} of {group!r} has pieces of {sorted(map(str, kinds))}, and all must "
                    f"be of one shape and one dtype, of {', '.join(STORABLE)}; {_MISTAKE}"
                )
            boxes = tuple(dict.fromkeys(piece.box for piece in filled))
            same = tuple((*kinds, _identity(piece.tensor), piece.box) for piece in filled)
            earlier = first.setdefault(same, name) if same else name
            known = None if earlier == name else earlier
            holding[group][name] = LocalEntry(_NAMES[dtype], tuple(parts[0].shape), boxes, known)
    return holding


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same memory seen in the same way."""
    storage = (tensor.device, tensor.untyped_storage().data_ptr())
    return (*storage, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def make_index(ranks: Sequence[LocalEntries]) -> Index:
    """Plan who writes what.

    Args:
        ranks: what each of them holds.

    Raises `UserError` where the pieces of a tensor contradict each other, overlap or leave a hole.
    """
    index: dict[str, dict[str, Entry]] = {}
    shared: list[tuple[int, int, str, str, TensorSlice, list[int]]] = []
    for group in dict.fromkeys(group for rank in ranks for group in rank):
        assert plain_name(group), f"{group!r} cannot be a file's name"
        index[group] = {}
        for name in dict.fromkeys(name for rank in ranks for name in rank.get(group, {})):
            held = {r: rank[group][name] for r, rank in enumerate(ranks) if name in rank.get(group, {})}
            entry, holders = _agree(group, name, held)
            index[group][name] = entry
            for box, who in holders.items():
                shared.append((len(who), -box.volume * entry.itemsize, group, name, box, who))
    load = [0] * len(ranks)
    parts: dict[tuple[str, str], list[StoredSlice]] = {}
    for _, less, group, name, box, who in sorted(shared):  # those without a choice first, then the largest
        rank = min(who, key=lambda r: load[r])
        load[rank] -= less
        is_whole = box.size == index[group][name].shape
        key = name if is_whole else f"{name}@{','.join(map(str, box.offset))}"
        part = StoredSlice(file_name(group, rank, len(ranks)), key, box)
        parts.setdefault((group, name), []).append(part)
    return {
        group: {
            name: replace(entry, parts=tuple(parts.get((group, name), ()))) for name, entry in named.items()
        }
        for group, named in index.items()
    }


def file_name(group: str, rank: int, ranks: int) -> str:
    """What a rank's file of a group is called."""
    return f"{group}{SUFFIX}" if ranks == 1 else f"{group}-{rank + 1:05}-of-{ranks:05}{SUFFIX}"


def _agree(
    group: str, name: str, held: Mapping[int, LocalEntry]
) -> tuple[Entry, dict[TensorSlice, list[int]]]:
    """What the ranks that hold a tensor say of it, and who holds each box; nobody of a second name's."""
    kinds = {(h.dtype, h.shape) for h in held.values()}
    if len(kinds) > 1:
        raise UserError(
            f"tensor {name!r} of {group!r} is {' and '.join(map(str, sorted(kinds)))} on different ranks, "
            f"and it must be the same on all; {_MISTAKE}"
        )
    entry = Entry(*kinds.pop(), parts=())
    known = {h.same_as for h in held.values() if h.boxes}
    if len(known) == 1 and (first := known.pop()) is not None:
        return replace(entry, same_as=first), {}
    holders: dict[TensorSlice, list[int]] = {}
    for rank, h in held.items():
        for box in h.boxes:
            holders.setdefault(box, []).append(rank)
    try:
        require_exact_cover(entry.shape, holders)
    except ValueError as error:
        raise UserError(f"tensor {name!r} of {group!r} cannot be saved: {error}; {_MISTAKE}") from None
    return entry, holders


def plan_for_rank(
    index: Index, pieces: LocalTensors, rank: int, ranks: int
) -> dict[str, dict[str, torch.Tensor]]:
    """What this rank has to write: for each group that it has a file of, the tensors by their keys."""
    share: dict[str, dict[str, torch.Tensor]] = {}
    for group, named in index.items():
        file = file_name(group, rank, ranks)
        for name, entry in named.items():
            for part in entry.parts:
                if part.file == file:
                    mine = share.setdefault(group, {})
                    assert part.key not in mine, f"two tensors are called {part.key!r}"
                    mine[part.key] = next(p.tensor for p in pieces[group][name] if p.box == part.box)
    return share
