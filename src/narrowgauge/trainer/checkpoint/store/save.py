"""Saves from one process or many: tensors as safetensors, everything else as JSON, nothing as pickle.

    step-20/model.safetensors                one file for each group of tensors or, with several processes,
    step-20/model-00001-of-00004.safetensors   one for each rank that has something to write in the group
    step-20/index.json                       which file holds which slice of which tensor (`index.py`)
    step-20/state.json                       step counters, schedule, data position: whatever is not a tensor
    step-20/manifest.json                    size and SHA-256 of each

Tensors are restored bit for bit in their own dtype. JSON preserves Python's floats and integers exactly: the
text of a float is the shortest that reads back as the same value. Several processes write into one staging
directory on a shared file system:

    plan      every rank describes what it holds; all make the same plan (`save_plan.py`)
    check     nothing that any rank would write is a NaN or an infinity
    begin     rank 0 checks the disk space and creates the staging directory
    write     every rank writes, hashes and syncs its own files
    gather    the digests of all, or the errors of any
    publish   rank 0 writes the index and the state, seals, publishes, retains; its outcome is broadcast

So all of them return the path, or all raise the same error. `commit` describes
how the directory becomes visible. Saving adds the crash points `write:FILE`, `written:FILE` (not for JSON)
and `synced:FILE` for each file.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from narrowgauge.system.collectives import rank_in, size_of
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
from narrowgauge.trainer.checkpoint.store.index import INDEX, Index, LocalTensors, full_tensor, to_json
from narrowgauge.trainer.checkpoint.store.manifest import MANIFEST, FileEntry
from narrowgauge.trainer.checkpoint.store.safetensors_writer import write_safetensors
from narrowgauge.trainer.checkpoint.store.save_plan import describe, file_name, make_index, plan_for_rank

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
        data = sum(stored.slice.numel * entry.itemsize for entry in entries for stored in entry.slices)
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
