"""Reading a checkpoint back: whole, or the parts that this process wants, whoever wrote it.

A checkpoint of any number of processes is read by any other number, cut in any other way (elastic resume):
each wanted piece is put together from its overlaps with the stored parts. A rank reads no other bytes, and it
verifies the files that it reads. Nothing is changed before every rank has found everything in order.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from narrowgauge.checkpoint.store.collective import on_all_ranks, on_rank0
from narrowgauge.checkpoint.store.commit import newest_valid
from narrowgauge.checkpoint.store.index import INDEX, STORABLE, SUFFIX, Entry, Index, StoredSlice, from_json
from narrowgauge.checkpoint.store.manifest import (
    DamagedError,
    Manifest,
    read_bounded,
    verify_files,
    verify_listing,
)
from narrowgauge.checkpoint.store.save import STATE
from narrowgauge.checkpoint.store.slices import (
    LocalTensor,
    LocalTensors,
    TensorSlice,
    full_tensor,
    require_inside,
)
from narrowgauge.errors import UserError

_LARGEST_JSON = 1 << 30


@dataclass(frozen=True)
class Checkpoint:
    """What a step holds: CPU tensors by group and name, and the JSON state."""

    step: int
    run_id: str
    tensors: dict[str, dict[str, torch.Tensor]]
    state: dict[str, Any]


def choose_step(
    directory: Path, run_id: str | None, group: dist.ProcessGroup | None
) -> tuple[Path | None, list[str]]:
    """The newest step that verifies, the same on all ranks: rank 0 reads, and tells the others.

    Returns and raises as `newest_valid`, on all ranks alike.
    """

    def choose() -> tuple[str | None, list[str]]:
        path, refused = newest_valid(directory, run_id)
        return (None if path is None else path.name), refused

    name, refused = on_rank0(choose, group, UserError)
    return (None if name is None else directory / name), refused


def load(path: Path) -> Checkpoint:
    """Read a published step whole; every file is checked against the manifest before it is parsed.

    Nothing in the files is executed, and tensors are on the CPU. A second name of a tensor loads as the same
    object. Raises `DamagedError` (a `UserError`) that names the file and the reason.
    """
    path = Path(os.path.abspath(path))
    opened = _open(path)
    verify_files(path, opened.manifest, opened.tensor_files)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    wanted = []
    for group, named in opened.index.items():
        own = {n: torch.empty(e.shape, dtype=STORABLE[e.dtype]) for n, e in named.items() if not e.same_as}
        tensors[group] = {name: own[entry.same_as or name] for name, entry in named.items()}
        wanted += [(named[name], full_tensor(tensor)) for name, tensor in own.items()]
    _fill(path, wanted)
    return Checkpoint(opened.manifest.step, opened.manifest.run_id, tensors, opened.state)


def restore_distributed(
    path: Path, pieces: LocalTensors, group: dist.ProcessGroup | None = None
) -> Checkpoint:
    """Fill pieces in place from a published step of any number of ranks. Called by every rank of `group`.

    Args:
        path: of step-N, the same on all ranks.
        pieces: group -> name -> pieces that this rank wants; their tensors are written into, on any device.
            Groups that no rank names are left alone; of a group that is named, all ranks together must
            want every tensor.
        group: of gloo; None = this process alone.

    Returns:
        The checkpoint, without its tensors.

    Raises, on all ranks alike, before anything is changed:
        DamagedError: a file that is needed is not what the manifest says, or not one of ours.
        UserError: a tensor is missing, left over, or of another shape or dtype; it is named.
    """
    path = Path(os.path.abspath(path))
    opened: list[_Opened] = []
    filled: list[tuple[Entry, LocalTensor]] = []

    def prepare() -> dict[str, set[str]]:
        opened.append(_open(path))
        filled.extend(_match(opened[0], pieces))
        needed = {part.file for entry, piece in filled for part, _ in _overlaps(entry, piece.box)}
        verify_files(path, opened[0].manifest, needed)
        return {group: set(named) for group, named in pieces.items()}

    def unreadable(reason: str) -> UserError:
        return DamagedError(f"{path} cannot be read: {reason}")

    _refuse_left_over(opened, on_all_ranks(prepare, group, unreadable))
    on_all_ranks(lambda: _fill(path, filled), group, unreadable)
    manifest = opened[0].manifest
    return Checkpoint(manifest.step, manifest.run_id, {}, opened[0].state)


@dataclass(frozen=True)
class _Opened:
    """A checkpoint whose JSON files have been verified and read."""

    path: Path
    manifest: Manifest
    index: Index
    state: dict[str, Any]

    @property
    def tensor_files(self) -> list[str]:
        return [name for name in self.manifest.files if name.endswith(SUFFIX)]


def _open(path: Path) -> _Opened:
    manifest = verify_listing(path)
    for name in (STATE, INDEX):
        if name not in manifest.files:
            raise DamagedError(f"{path / name} is missing: a checkpoint of this kind has one")
    known = {name: entry.size for name, entry in manifest.files.items() if name.endswith(SUFFIX)}
    if strange := manifest.files.keys() - known.keys() - {STATE, INDEX}:
        raise DamagedError(
            f"{path / min(strange)} is neither {STATE}, {INDEX} nor *{SUFFIX}, and nothing else is read"
        )
    state = _read_json(path / STATE, manifest)
    try:
        index = from_json(_read_json(path / INDEX, manifest), known)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise DamagedError(f"{path / INDEX} is no index that can be trusted: {error!r}") from error
    return _Opened(path, manifest, index, state)


def _read_json(path: Path, manifest: Manifest) -> dict[str, Any]:
    data = read_bounded(path, _LARGEST_JSON)
    if hashlib.sha256(data).hexdigest() != manifest.files[path.name].sha256:  # of the bytes that are parsed
        raise DamagedError(f"{path} was changed: its sha256 is not what its manifest says")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise DamagedError(f"{path} is not a JSON object")
    return content


def _match(opened: _Opened, pieces: LocalTensors) -> list[tuple[Entry, LocalTensor]]:
    """The entry of each wanted piece. Raises `UserError` where the checkpoint has another tensor."""
    found = []
    for group, named in pieces.items():
        for name, parts in named.items():
            entry = opened.index.get(group, {}).get(name)
            if entry is None:
                raise _another(opened.path, f"it has no {name!r} of {group!r}")
            source = entry if entry.same_as is None else opened.index[group][entry.same_as]
            for piece in parts:
                if entry.shape != tuple(piece.shape):
                    sizes = f"{entry.shape} there and {tuple(piece.shape)} here"
                    raise _another(opened.path, f"{name!r} of {group!r} is {sizes}")
                if (dtype := STORABLE[entry.dtype]) != piece.tensor.dtype:
                    raise UserError(
                        f"{opened.path} keeps {name!r} of {group!r} as {dtype}, and this run as "
                        f"{piece.tensor.dtype}; use the recipe it was made with, or narrowgauge convert"
                    )
                if piece.box.volume:
                    require_inside(source.shape, piece.box)
                found.append((source, piece))
    return found


def _refuse_left_over(opened: Sequence[_Opened], ranks: Sequence[Mapping[str, set[str]]]) -> None:
    """Refuse tensors of the checkpoint that no rank wants: a moment that is dropped is a wrong start."""
    for group in sorted({group for wanted in ranks for group in wanted}):
        wanted = {name for rank in ranks for name in rank.get(group, ())}
        if extra := opened[0].index.get(group, {}).keys() - wanted:
            raise _another(opened[0].path, f"nothing here takes its {min(extra)!r} of {group!r}")


def _another(path: Path, difference: str) -> UserError:
    return UserError(f"{path} is another model's: {difference}; use the configuration it was made with")


def _overlaps(entry: Entry, box: TensorSlice) -> Iterator[tuple[StoredSlice, TensorSlice]]:
    for part in entry.parts:
        if (common := part.box.overlap(box)) is not None:
            yield part, common


@torch.no_grad()
def _fill(path: Path, wanted: Iterable[tuple[Entry, LocalTensor]]) -> None:
    """Copy stored parts into pieces. Digests have been checked; the content is still not trusted."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for entry, piece in wanted:
            for part, common in _overlaps(entry, piece.box):
                try:
                    if part.file not in files:
                        opened = safe_open(path / part.file, framework="pt", device="cpu")
                        files[part.file] = stack.enter_context(opened)
                    stored = files[part.file].get_slice(part.key)
                    _check_slice(stored, part, entry)
                    data = stored[common.within(part.box).slices or ...]
                except (SafetensorError, OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
                    raise DamagedError(
                        f"{path / part.file} is not a safetensors file that can be trusted: {error!r}"
                    ) from error
                _raw(piece.tensor)[common.within(piece.box).slices].copy_(_raw(data))


def _check_slice(stored: Any, part: StoredSlice, entry: Entry) -> None:
    dtype = "U8" if entry.dtype == "F4" else entry.dtype
    if (stored.get_dtype(), tuple(stored.get_shape())) != (dtype, part.box.size):
        raise ValueError(f"{part.key!r} is {stored.get_dtype()} {stored.get_shape()}, not what {INDEX} says")


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Dtypes of a byte as bytes: they are copied as they are."""
    tensor = tensor.detach()
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
