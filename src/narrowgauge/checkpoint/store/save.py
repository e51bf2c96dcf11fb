"""Saving by one process or by many: tensors as safetensors, everything else as JSON, nothing as pickle.

    step-20/model.safetensors                one file for each group of tensors, or, of several processes,
    step-20/model-00001-of-00004.safetensors   one for each rank that has something to write in the group
    step-20/index.json                       which file holds which part of which tensor (`index.py`)
    step-20/state.json                       step counters, schedule, data position: whatever is not a tensor
    step-20/manifest.json                    size and SHA-256 of each

Tensors come back bit for bit in their own dtype. JSON keeps Python's floats and integers exactly: the
text of a float is the shortest that reads back as the same one. Several processes write into one draft on a
file system that they share:

    plan      every rank says what it holds; all make the same plan (`sharing.py`)
    check     nothing that any rank would write is a NaN or an infinity
    begin     rank 0 asks for room on the disk and makes the draft
    write     every rank writes, hashes and syncs its own files
    gather    the digests of all, or the errors of any
    publish   rank 0 writes the index and the state, seals, publishes, retains; all ranks learn how it went

So all of them have the path, or all raise the same error. How the directory becomes visible is described in
`narrowgauge.checkpoint.store.commit`. Saving adds the crash points `write:FILE`, `written:FILE` (not for
JSON) and `synced:FILE` for each file.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from narrowgauge.checkpoint.store.collective import on_all_ranks, on_rank0
from narrowgauge.checkpoint.store.commit import begin, publish, retain, seal
from narrowgauge.checkpoint.store.disk_space import SaveError, require_space
from narrowgauge.checkpoint.store.index import INDEX, Index, to_json
from narrowgauge.checkpoint.store.manifest import MANIFEST, FileEntry
from narrowgauge.checkpoint.store.nonfinite import JSON, Tensors, refuse_non_finite
from narrowgauge.checkpoint.store.safetensors_writer import write_safetensors
from narrowgauge.checkpoint.store.save_plan import describe, file_name, make_index, plan_for_rank
from narrowgauge.checkpoint.store.slices import LocalTensors, full_tensor
from narrowgauge.collectives import rank_in, size_of
from narrowgauge.files import write_new

STATE = "state.json"
_HEADER = 1 << 20  # bytes: room for a file's header, and for each JSON file


def save(
    directory: Path, step: int, tensors: Tensors, state: Mapping[str, JSON], keep: int, run_id: str
) -> Path:
    """Publish a step of one process: `save_distributed` of whole tensors (group -> name -> tensor)."""
    pieces = {
        g: {name: [full_tensor(tensor)] for name, tensor in named.items()} for g, named in tensors.items()
    }
    return save_distributed(directory, step, pieces, state, keep, run_id, None)


def save_distributed(
    directory: Path,
    step: int,
    pieces: LocalTensors,
    state: Mapping[str, JSON],
    keep: int,
    run_id: str,
    group: dist.ProcessGroup | None,
) -> Path:
    """Publish step `step` under `directory` whole or not at all, then keep the newest `keep` valid steps.

    Called by every rank of `group`.

    Args:
        directory: RUN/checkpoints, on a file system of all ranks, made if need be; the caller holds the run's
            lock.
        step: optimizer steps done.
        pieces: group -> name -> what this rank holds of the tensor, if anything. On all ranks together the
            pieces of a tensor cover it exactly; equal pieces on several ranks are equal in content.
        state: plain JSON, that of rank 0; tuples come back as lists.
        keep: how many valid steps stay, at least 2.
        run_id: what `choose_step` will ask for.
        group: of gloo; None = this process alone.

    Returns:
        The path of step-N.

    Raises, on all ranks alike:
        PoisonedError: a floating tensor or number is not finite.
        SaveError: the operating system refuses (disk full, no permission) on any rank: the draft is removed,
            older steps stay as they were.
        UserError: the pieces overlap, leave a hole, or contradict each other.
    """
    return write_share(plan_save(directory, step, pieces, state, keep, run_id, group))


@dataclass(frozen=True)
class Save:
    """A save that is planned: who writes what, and what this rank has to write."""

    directory: Path
    step: int
    index: Index
    share: Tensors  # group -> key in the rank's file -> tensor
    state: Mapping[str, JSON]
    keep: int
    run_id: str
    group: dist.ProcessGroup | None

    def failed(self, reason: str) -> SaveError:
        """What the operating system said, in a sentence."""
        return SaveError(
            f"step {self.step} could not be saved under {str(self.directory)!r} ({reason}), and the "
            f"checkpoints there are untouched; free disk space or mend the permissions before the next save"
        )

    def require_space(self, checkpoints: int = 1) -> None:
        """Check that the disk has room for so many. Raises `SaveError` with what is needed and free."""
        entries = [entry for named in self.index.values() for entry in named.values()]
        data = sum(part.box.volume * entry.itemsize for entry in entries for part in entry.parts)
        files = {part.file for entry in entries for part in entry.parts} | {INDEX, STATE, MANIFEST}
        bytes_, inodes = data + _HEADER * len(files), len(files) + 1  # for the directory
        require_space(self.directory, checkpoints * bytes_, checkpoints * inodes)


def plan_save(
    directory: Path,
    step: int,
    pieces: LocalTensors,
    state: Mapping[str, JSON],
    keep: int,
    run_id: str,
    group: dist.ProcessGroup | None,
) -> Save:
    """The first part of `save_distributed`: agree on who writes what."""
    assert keep >= 2
    assert step >= 0
    holdings = on_all_ranks(lambda: describe(pieces), group, SaveError)
    index = make_index(holdings)
    share = plan_for_rank(index, pieces, rank_in(group), size_of(group))
    return Save(directory, step, index, share, state, keep, run_id, group)


def write_share(save: Save) -> Path:
    """The rest of `save_distributed`: write this rank's share, and publish what all have written."""
    group = save.group
    on_all_ranks(lambda: refuse_non_finite(save.share, save.state), group, save.failed)
    staging = save.directory / on_rank0(lambda: _begin(save), group, save.failed)
    try:
        written = on_all_ranks(lambda: _write_files(staging, save), group, save.failed)
        entries = {name: entry for files in written for name, entry in files.items()}
        on_rank0(lambda: _publish(staging, save, entries), group, save.failed)
    finally:
        if rank_in(group) == 0:  # a published draft has another name by now
            shutil.rmtree(staging, ignore_errors=True)
    return save.directory / f"step-{save.step}"


def _begin(save: Save) -> str:
    save.require_space()
    return begin(save.directory, save.step).name


def _write_files(staging: Path, save: Save) -> dict[str, FileEntry]:
    """Write this rank's tensors."""
    files = {}
    for group, tensors in save.share.items():
        name = file_name(group, rank_in(save.group), size_of(save.group))
        files[name] = write_safetensors(staging / name, {key: _storable(t) for key, t in tensors.items()})
    return files


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """FP4 pairs, of which safetensors cannot read a part, as their bytes."""
    return tensor.detach().view(torch.uint8) if tensor.dtype is torch.float4_e2m1fn_x2 else tensor


def _publish(staging: Path, save: Save, entries: Mapping[str, FileEntry]) -> None:
    """What rank 0 does when all have written."""
    state = json.dumps(dict(save.state), allow_nan=False, indent=1) + "\n"
    texts = {INDEX: to_json(save.index), STATE: state}
    described = {name: _write_text(staging / name, text) for name, text in texts.items()}
    manifest = seal(staging, save.step, save.run_id, {**entries, **described})
    publish(staging, manifest)
    try:
        retain(save.directory, save.keep, manifest)
    except OSError as error:
        raise SaveError(
            f"step {save.step} is saved, but older steps could not be removed ({error}), so the disk will "
            f"fill; mend the permissions of {str(save.directory)!r}"
        ) from error


def _write_text(path: Path, text: str) -> FileEntry:
    data = text.encode()
    write_new(path, data)
    return FileEntry(len(data), hashlib.sha256(data).hexdigest())
