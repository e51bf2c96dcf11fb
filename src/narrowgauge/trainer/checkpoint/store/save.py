"""Saves from one process or many: tensors as safetensors, everything else as JSON, nothing as pickle.

    step-20/model.safetensors                one file for each group of tensors or, with several processes,
    step-20/model-00001-of-00004.safetensors   one for each rank that has something to write in the group
    step-20/index.json                       which file holds which slice of which tensor (`index.py`)
    step-20/state.json                       step counters, schedule, data position: whatever is not a tensor
    step-20/manifest.json                    size and SHA-256 of each

Tensors are restored bit for bit in their own dtype. JSON preserves Python's floats and integers exactly: the
text of a float is the shortest that reads back as the same value. Several processes write into one staging
directory on a shared file system:

    plan      every rank describes what it holds; all make the same plan
    check     nothing that any rank would write is a NaN or an infinity
    begin     rank 0 checks the disk space and creates the staging directory
    write     every rank writes, hashes and syncs its own files
    gather    the digests of all, or the errors of any
    publish   rank 0 writes the index and the state, seals, publishes, retains; its outcome is broadcast

So all of them return the path, or all raise the same error. The plan is a pure function of the descriptions.
A slice that several ranks hold is written by the one that has the least to write so far; slices that only one
rank holds are assigned first, then the largest. `commit` describes how the directory becomes visible. Saving
adds the crash points `write:FILE`, `written:FILE` (not for JSON) and `synced:FILE` for each file.

**In the background** a step waits only for a copy into memory, and a thread writes to disk (`AsyncSaver`):

    step n        | snapshot |  step n+1  |  step n+2  |  step n+3 ...
    background               | check, write, hash, sync, publish, retain |

The snapshot is a CPU copy of what this rank has to write, in buffers that are reused from save to save, so
later updates do not affect it. There is one save at a time: the next waits for the current one, so a slow
disk slows the run but never fills its memory. All ranks get the same outcome of a save at the same moment: at
the next `save` or `wait`. The saver uses a separate process group, so that its collectives never mix with
training's.
"""

import copy
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from narrowgauge.system.collectives import rank_in, size_of
from narrowgauge.system.errors import UserError
from narrowgauge.system.files import write_new
from narrowgauge.trainer.checkpoint.store.before_save import (
    JSON,
    DiskSpace,
    SaveError,
    Tensors,
    refuse_non_finite,
    require_space,
)
from narrowgauge.trainer.checkpoint.store.collective import on_all_ranks, on_rank0
from narrowgauge.trainer.checkpoint.store.commit import begin, publish, retain, seal
from narrowgauge.trainer.checkpoint.store.index import (
    INDEX,
    STORABLE,
    SUFFIX,
    Entry,
    Index,
    LocalTensors,
    TensorSlice,
    full_tensor,
    require_exact_cover,
    to_json,
)
from narrowgauge.trainer.checkpoint.store.manifest import MANIFEST, FileEntry, plain_name
from narrowgauge.trainer.checkpoint.store.safetensors_writer import write_safetensors

STATE = "state.json"
_SLACK = 1 << 16  # bytes for each file: its header, and the end of its last block


@dataclass(frozen=True)
class SavePlan:
    """A save that all ranks have agreed on."""

    directory: Path
    step: int
    index: Index  # which rank writes which slice
    tensors: Tensors  # of this rank: group -> key in its file -> tensor
    state: Mapping[str, JSON]  # plain JSON, that of rank 0
    keep: int  # how many valid steps stay
    run_id: str
    group: dist.ProcessGroup | None  # a gloo group; None = this process alone

    @property
    def space(self) -> DiskSpace:
        """Disk space for the files of all ranks, and for the directory."""
        entries = [entry for named in self.index.values() for entry in named.values()]
        data = sum(stored.numel * entry.itemsize for entry in entries for stored in entry.slices)
        files = {stored.file for entry in entries for stored in entry.slices} | {INDEX, STATE, MANIFEST}
        return DiskSpace(data + _SLACK * len(files), len(files) + 1)

    def failed(self, reason: str) -> SaveError:
        """The error for a reason given by the operating system."""
        return SaveError(
            f"step {self.step} could not be saved under {str(self.directory)!r} ({reason}), and the "
            f"checkpoints there are untouched; free disk space or fix the permissions before the next save"
        )

    def write(self) -> Path:
        """Write the files of this rank, publish what all ranks have written, and return the path of step-N.

        Called by every rank. The step becomes visible in full or not at all, and the newest `keep` valid
        steps are kept. All ranks raise the same error: a `PoisonedError`, or a `SaveError` if the operating
        system refuses on any of them. The staging directory is then removed, and older steps are unchanged.
        """
        on_all_ranks(lambda: refuse_non_finite(self.tensors, self.state), self.group, self.failed)
        staging = self.directory / on_rank0(self._begin, self.group, self.failed)
        try:
            written = on_all_ranks(lambda: self._write_tensors(staging), self.group, self.failed)
            entries = {name: entry for files in written for name, entry in files.items()}
            on_rank0(lambda: self._publish(staging, entries), self.group, self.failed)
        finally:
            if rank_in(self.group) == 0:  # a published directory has been renamed by now
                shutil.rmtree(staging, ignore_errors=True)
        return self.directory / f"step-{self.step}"

    def _begin(self) -> str:
        require_space(self.directory, self.space)
        return begin(self.directory, self.step).name

    def _write_tensors(self, staging: Path) -> dict[str, FileEntry]:
        files = {}
        for group, tensors in self.tensors.items():
            name = file_name(group, rank_in(self.group), size_of(self.group))
            stored = {key: _storable(tensor) for key, tensor in tensors.items()}
            files[name] = write_safetensors(staging / name, stored)
        return files

    def _publish(self, staging: Path, entries: Mapping[str, FileEntry]) -> None:
        """The work of rank 0 after all ranks have written."""
        state = json.dumps(dict(self.state), allow_nan=False, indent=1) + "\n"
        texts = {INDEX: to_json(self.index), STATE: state}
        described = {name: _write_text(staging / name, text) for name, text in texts.items()}
        manifest = seal(staging, self.step, self.run_id, {**entries, **described})
        publish(staging, manifest)
        try:
            retain(self.directory, self.keep, manifest)
        except OSError as error:
            raise SaveError(
                f"step {self.step} is saved, but older steps could not be removed ({error}), so the disk "
                f"will fill; fix the permissions of {str(self.directory)!r}"
            ) from error


def plan_save(
    directory: Path,
    step: int,
    local_tensors: LocalTensors,
    state: Mapping[str, JSON],
    keep: int,
    run_id: str,
    group: dist.ProcessGroup | None,
) -> SavePlan:
    """Agree on who writes what. Called by every rank of `group`.

    Args:
        directory: RUN/checkpoints, on a file system that all ranks share, created if it does not exist; the
            caller holds the run's lock.
        step: Optimizer steps done.
        local_tensors: The slices that this rank holds. Together, the ranks must cover each tensor exactly;
            equal slices on several ranks must have equal content.
        state: Plain JSON, taken from rank 0; tuples are restored as lists.
        keep: How many valid steps to keep, at least 2.
        run_id: The run that the checkpoint belongs to; `choose_step` requires it.
        group: A gloo group; None = this process alone.
    """
    assert keep >= 2
    assert step >= 0
    index = make_index(on_all_ranks(lambda: describe(local_tensors), group, SaveError))
    tensors = plan_for_rank(index, local_tensors, rank_in(group), size_of(group))
    return SavePlan(directory, step, index, tensors, state, keep, run_id, group)


def save(
    directory: Path, step: int, tensors: Tensors, state: Mapping[str, JSON], keep: int, run_id: str
) -> Path:
    """Publish a step of one process, from full tensors; see `plan_save` and `SavePlan.write`."""
    full = {
        g: {name: [full_tensor(tensor)] for name, tensor in named.items()} for g, named in tensors.items()
    }
    return plan_save(directory, step, full, state, keep, run_id, None).write()


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """FP4 pairs as bytes, because safetensors cannot read a slice of them."""
    return tensor.detach().view(torch.uint8) if tensor.dtype is torch.float4_e2m1fn_x2 else tensor


def _write_text(path: Path, text: str) -> FileEntry:
    data = text.encode()
    write_new(path, data)
    return FileEntry(len(data), hashlib.sha256(data).hexdigest())


_NAMES = {dtype: name for name, dtype in STORABLE.items()}
_MISTAKE = "this is a mistake of the program that saves"


def describe(local_tensors: LocalTensors) -> Index:
    """Describe what this rank holds; a `UserError` if a dtype cannot be stored or slices differ in it."""
    entries: dict[str, dict[str, Entry]] = {}
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
            entries[group][name] = Entry(_NAMES[dtype], tuple(held[0].shape), slices, same_as)
    return entries


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """A key that is equal for two tensors that view the same memory in the same way."""
    storage = (tensor.device, tensor.untyped_storage().data_ptr())
    return (*storage, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def make_index(ranks: Sequence[Index]) -> Index:
    """Decide which rank writes which slice, from the descriptions of all ranks, in order."""
    index: dict[str, dict[str, Entry]] = {group: {} for rank in ranks for group in rank}
    held: list[tuple[int, int, str, str, TensorSlice, list[int]]] = []
    for group, name in dict.fromkeys((g, n) for rank in ranks for g, named in rank.items() for n in named):
        assert plain_name(group), f"{group!r} cannot be a file's name"
        by_rank = {r: rank[group][name] for r, rank in enumerate(ranks) if name in rank.get(group, {})}
        entry, holders = _merge(group, name, by_rank)
        index[group][name] = entry
        for s, who in holders.items():
            held.append((len(who), -s.numel * entry.itemsize, group, name, s, who))
    load = [0] * len(ranks)  # bytes that each rank has to write
    for _, minus_bytes, group, name, s, who in sorted(held):  # those without a choice, then the largest
        rank = min(who, key=lambda r: load[r])
        load[rank] -= minus_bytes
        entry = index[group][name]
        key = name if s.size == entry.shape else f"{name}@{','.join(map(str, s.offset))}"
        stored = replace(s, file=file_name(group, rank, len(ranks)), key=key)
        index[group][name] = replace(entry, slices=(*entry.slices, stored))
    return index


def file_name(group: str, rank: int, ranks: int) -> str:
    """The name of a rank's file for a group."""
    return f"{group}{SUFFIX}" if ranks == 1 else f"{group}-{rank + 1:05}-of-{ranks:05}{SUFFIX}"


def _merge(group: str, name: str, by_rank: Mapping[int, Entry]) -> tuple[Entry, dict[TensorSlice, list[int]]]:
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
                    tensors[stored.key] = next(local.tensor for local in held if local.slice == stored)
    return plan


NICE = 10  # lower priority of the thread, so that training steps get the cores first


class AsyncSaver(AbstractContextManager["AsyncSaver"]):
    """Saves of one run in the background; a context manager that waits for the last one.

    All ranks construct it together, after torch.distributed is initialised if there are several.

    Args:
        timeout: How long a rank waits for another in the background; None = torch's default.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=timeout) if several else None
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_lower_priority)
        self._pending: Future[Path] | None = None
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, plan_for: Callable[[dist.ProcessGroup | None], SavePlan]) -> None:
        """Begin the save that `plan_for` plans for a group; returns when tensors and state may change again.

        It first waits for the save in progress. If that one failed, its error is raised and nothing is begun;
        the next call begins a save.
        """
        self.wait()
        plan = plan_for(self._group)
        snapshot = replace(plan, tensors=self._copy(plan.tensors), state=copy.deepcopy(plan.state))
        self._pending = self._thread.submit(snapshot.write)

    def wait(self) -> Path | None:
        """Wait for the save in progress and raise its error; returns its path, or None if there is none."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """Wait for the last save, end the thread, and raise the save's error."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._buffers.clear()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
                self._group = None

    def _copy(self, tensors: Tensors) -> Tensors:
        """The current tensors, in memory that nothing else writes to."""
        copies = {
            group: {key: self._copied(group, key, tensor.detach()) for key, tensor in named.items()}
            for group, named in tensors.items()
        }
        if any(tensor.is_cuda for named in tensors.values() for tensor in named.values()):
            torch.cuda.current_stream().synchronize()
        return copies

    def _copied(self, group: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get((group, key))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[group, key] = buffer
        if tensor.dtype.itemsize == 1:  # bytes are copied as they are, including FP4 pairs
            buffer.view(torch.uint8).copy_(tensor.view(torch.uint8), non_blocking=True)
        else:
            buffer.copy_(tensor, non_blocking=True)
        return buffer


def _lower_priority() -> None:
    """Lower the priority of this thread alone; only Linux supports this."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
