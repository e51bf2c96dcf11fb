"""Reads a checkpoint: all of it, or the slices that this process requests.

A checkpoint of any number of processes can be read by any other number, sharded in any other way (elastic
resume): each requested slice is assembled from its overlaps with the stored ones. A rank reads no other
bytes, and verifies the files that it reads. Nothing is changed before every rank has checked everything.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.store.collective import on_all_ranks, on_rank0
from narrowgauge.trainer.checkpoint.store.commit import newest_valid
from narrowgauge.trainer.checkpoint.store.index import (
    INDEX,
    STORABLE,
    SUFFIX,
    Entry,
    Index,
    LocalTensor,
    LocalTensors,
    TensorSlice,
    from_json,
    full_tensor,
    require_inside,
)
from narrowgauge.trainer.checkpoint.store.manifest import (
    DamagedError,
    Manifest,
    json_object,
    read_bounded,
    verify_files,
    verify_listing,
)
from narrowgauge.trainer.checkpoint.store.save import STATE

_LARGEST_JSON = 1 << 30


@dataclass(frozen=True)
class Checkpoint:
    """The content of a step: CPU tensors by group and name, and the JSON state."""

    step: int
    run_id: str
    tensors: dict[str, dict[str, torch.Tensor]]
    state: dict[str, Any]


def choose_step(
    directory: Path, run_id: str | None, group: dist.ProcessGroup | None
) -> tuple[Path | None, list[str]]:
    """`newest_valid` on rank 0; all ranks return or raise the same."""
    return on_rank0(lambda: newest_valid(directory, run_id), group, UserError)


def load(path: Path) -> Checkpoint:
    """Read all of a published step to the CPU. Each file is verified before it is parsed; none is executed.

    A second name of a tensor loads as the same object.
    """
    opened = _open(path)
    verify_files(opened.path, opened.manifest, opened.manifest.files)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    requested = []
    for group, named in opened.index.items():
        new = {n: torch.empty(e.shape, dtype=STORABLE[e.dtype]) for n, e in named.items() if not e.same_as}
        tensors[group] = {name: new[entry.same_as or name] for name, entry in named.items()}
        requested += [(named[name], full_tensor(tensor)) for name, tensor in new.items()]
    _fill(opened.path, requested)
    return opened.checkpoint(tensors)


def read_state(path: Path, group: dist.ProcessGroup | None = None) -> Checkpoint:
    """A published step without its tensors; all ranks of `group` together."""
    return on_rank0(lambda: _open(path).checkpoint({}), group, partial(_unreadable, path))


def restore_distributed(
    path: Path, local_tensors: LocalTensors, group: dist.ProcessGroup | None = None
) -> Checkpoint:
    """Fill tensors in place from a published step of any number of ranks; all ranks of `group` together.

    All ranks raise the same error, before anything is changed. The returned checkpoint has no tensors.
    `local_tensors` are the slices that this rank requests; their tensors, on any device, are filled. A group
    that no rank requests is not read; in the others the ranks must request every tensor.
    """
    opened: list[_Opened] = []
    requested: list[tuple[Entry, LocalTensor]] = []

    def prepare() -> dict[str, set[str]]:
        opened.append(_open(path))
        requested.extend(_match(opened[0], local_tensors))
        needed = {stored.file for entry, local in requested for stored, _ in _overlaps(entry, local.slice)}
        verify_files(opened[0].path, opened[0].manifest, needed)
        return {group: set(named) for group, named in local_tensors.items()}

    _refuse_left_over(opened, on_all_ranks(prepare, group, partial(_unreadable, path)))
    on_all_ranks(lambda: _fill(opened[0].path, requested), group, partial(_unreadable, path))
    return opened[0].checkpoint({})


def _unreadable(path: Path, reason: str) -> UserError:
    return DamagedError(f"{path} cannot be read: {reason}")


@dataclass(frozen=True)
class _Opened:
    """A checkpoint whose JSON files have been verified and read."""

    path: Path
    manifest: Manifest
    index: Index
    state: dict[str, Any]

    def checkpoint(self, tensors: dict[str, dict[str, torch.Tensor]]) -> Checkpoint:
        return Checkpoint(self.manifest.step, self.manifest.run_id, tensors, self.state)


def _open(path: Path) -> _Opened:
    path = Path(os.path.abspath(path))
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
        raise DamagedError(f"{path / INDEX} is not an index that can be trusted: {error!r}") from error
    return _Opened(path, manifest, index, state)


def _read_json(path: Path, manifest: Manifest) -> dict[str, Any]:
    data = read_bounded(path, _LARGEST_JSON)
    if hashlib.sha256(data).hexdigest() != manifest.files[path.name].sha256:  # of the bytes that are parsed
        raise DamagedError(f"{path} was changed: its sha256 is not the one in its manifest")
    return json_object(data, lambda reason: DamagedError(f"{path} {reason}"))


def _match(opened: _Opened, local_tensors: LocalTensors) -> list[tuple[Entry, LocalTensor]]:
    """Each requested slice with the entry of its tensor; a `UserError` if the checkpoint's differs."""
    matched = []
    for group, named in local_tensors.items():
        for name, requested in named.items():
            entry, tensor = opened.index.get(group, {}).get(name), f"{name!r} of {group!r}"
            if entry is None:
                raise _another(opened.path, f"it has no {tensor}")
            source = entry if entry.same_as is None else opened.index[group][entry.same_as]
            for local in requested:
                if entry.shape != tuple(local.shape):
                    difference = f"{tensor} is {entry.shape} there and {tuple(local.shape)} here"
                    raise _another(opened.path, difference)
                if (dtype := STORABLE[entry.dtype]) != local.tensor.dtype:
                    raise UserError(
                        f"{opened.path} keeps {tensor} as {dtype}, and this run as {local.tensor.dtype}; use "
                        "the recipe it was made with, or narrowgauge train --branch"
                    )
                if local.slice.numel:
                    require_inside(source.shape, local.slice)
                matched.append((source, local))
    return matched


def _refuse_left_over(opened: Sequence[_Opened], ranks: Sequence[Mapping[str, set[str]]]) -> None:
    """Refuse tensors of the checkpoint that no rank requests: a run without a moment would start wrong."""
    for group in sorted({group for rank in ranks for group in rank}):
        requested = {name for rank in ranks for name in rank.get(group, ())}
        if extra := opened[0].index.get(group, {}).keys() - requested:
            raise _another(opened[0].path, f"nothing here uses its {min(extra)!r} of {group!r}")


def _another(path: Path, difference: str) -> UserError:
    return UserError(f"{path} is another model's: {difference}; use the configuration it was made with")


def _overlaps(entry: Entry, requested: TensorSlice) -> Iterator[tuple[TensorSlice, TensorSlice]]:
    for stored in entry.slices:
        if (common := stored.overlap(requested)) is not None:
            yield stored, common


@torch.no_grad()
def _fill(path: Path, requested: Iterable[tuple[Entry, LocalTensor]]) -> None:
    """Copy stored slices into local tensors. Digests have been checked; the content is still not trusted."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for entry, local in requested:
            for stored, common in _overlaps(entry, local.slice):
                try:
                    if stored.file not in files:
                        opened = safe_open(path / stored.file, framework="pt", device="cpu")
                        files[stored.file] = stack.enter_context(opened)
                    data = _read(files[stored.file], stored, entry.dtype, common)
                except (SafetensorError, OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
                    raise DamagedError(
                        f"{path / stored.file} is not a safetensors file that can be trusted: {error!r}"
                    ) from error
                _raw(local.tensor)[common.within(local.slice).index].copy_(_raw(data))


def _read(file: Any, stored: TensorSlice, dtype: str, common: TensorSlice) -> torch.Tensor:
    """The elements `common` of a stored slice; a `ValueError` if it does not match the index."""
    data = file.get_slice(stored.key)
    if (data.get_dtype(), tuple(data.get_shape())) != ("U8" if dtype == "F4" else dtype, stored.size):
        raise ValueError(f"{stored.key!r} is {data.get_dtype()} {data.get_shape()}, unlike in {INDEX}")
    elements: torch.Tensor = data[common.within(stored).index or ...]
    return elements


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of one byte as uint8, which are copied unchanged."""
    tensor = tensor.detach()
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
