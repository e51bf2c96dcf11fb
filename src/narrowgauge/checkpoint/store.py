"""Saving and loading for one process: tensors as safetensors, everything else as JSON, nothing as pickle.

    step-20/model.safetensors      one file per group of tensors
    step-20/optimizer.safetensors
    step-20/state.json             step counters, schedule, data position: whatever is not a tensor
    step-20/manifest.json          size and SHA-256 of each

Tensors come back bit for bit in their own dtype. Two names for one tensor (tied weights) are stored once:
the second name stands in the file's metadata, and loads as the same tensor object. JSON keeps
Python's floats and integers exactly: the text of a float is the shortest that reads back as the same one.

How the directory becomes visible is described in `narrowgauge.checkpoint.publication`. Saving adds the
crash points `write:FILE` and `written:FILE` for each file.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from narrowgauge.checkpoint.files import crash_point, write_new
from narrowgauge.checkpoint.finite import JSON, Tensors, refuse_non_finite
from narrowgauge.checkpoint.manifest import DamagedError, plain_name, read_bounded, verify
from narrowgauge.checkpoint.publication import begin, describe, publish, retain, seal
from narrowgauge.errors import UserError

STATE = "state.json"
SUFFIX = ".safetensors"
ALIASES = "aliases"  # key in a safetensors file's metadata: JSON, second name -> stored name


class SaveError(UserError):
    """A checkpoint could not be written. The older ones are untouched, and training can go on."""


@dataclass(frozen=True)
class Checkpoint:
    """What a step holds: CPU tensors by group and name, and the JSON state."""

    step: int
    run_id: str
    tensors: dict[str, dict[str, torch.Tensor]]
    state: dict[str, Any]


def save(
    directory: Path, step: int, tensors: Tensors, state: Mapping[str, JSON], keep: int, run_id: str
) -> Path:
    """Publish step `step` under `directory` whole or not at all, then keep the newest `keep` valid steps.

    Args:
        directory: RUN/checkpoints, made if need be; the caller holds the run's lock.
        step: optimizer steps done.
        tensors: group -> name -> tensor, on any device, any strides, dtypes of safetensors; a group's
            name becomes a file's.
        state: plain JSON; tuples come back as lists.
        keep: how many valid steps stay, at least 2.
        run_id: what `newest_valid` will ask for.

    Returns:
        The path of step-N.

    Raises `PoisonedError` where a floating tensor or number is not finite, and `SaveError` where the
    operating system refuses (disk full, no permission): the draft is removed, older steps stay as they were.
    """
    assert keep >= 2
    assert step >= 0
    refuse_non_finite(tensors, state)
    try:
        with _draft(directory, step) as draft:
            files = [_write_group(draft, group, named) for group, named in tensors.items()]
            write_new(draft / STATE, json.dumps(dict(state), allow_nan=False, indent=1) + "\n")
            manifest = seal(draft, step, run_id, {name: describe(draft / name) for name in [*files, STATE]})
            path = publish(draft, manifest)
    except OSError as error:
        raise SaveError(
            f"step {step} could not be saved under {str(directory)!r} ({error}), and the checkpoints "
            f"there are untouched; free disk space or mend the permissions before the next save"
        ) from error
    try:
        retain(directory, keep, manifest)
    except OSError as error:
        raise SaveError(
            f"step {step} is saved, but older steps could not be removed ({error}), so the disk will "
            f"fill; mend the permissions of {str(directory)!r}"
        ) from error
    return path


@contextmanager
def _draft(directory: Path, step: int) -> Iterator[Path]:
    """A draft that does not outlive the `with`; a published one has another name by then."""
    draft = begin(directory, step)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def operating_system_error(error: SafetensorError, path: Path) -> Exception:
    """The `OSError` that safetensors wraps into a text; the same error where it is of another kind."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1])), str(path)) if found else error


def load(path: Path) -> Checkpoint:
    """Read a published step; every file is checked against the manifest before it is parsed.

    Nothing in the files is executed, and tensors are on the CPU. Raises `DamagedError` (a `UserError`) that
    names the file and the reason.
    """
    path = Path(os.path.abspath(path))
    manifest = verify(path)
    if STATE not in manifest.files:
        raise DamagedError(f"{path / STATE} is missing: a checkpoint of this kind has one")
    if strange := [name for name in manifest.files if name != STATE and not name.endswith(SUFFIX)]:
        raise DamagedError(f"{path / strange[0]} is neither {STATE} nor *{SUFFIX}, and nothing else is read")
    groups = {name.removesuffix(SUFFIX): path / name for name in manifest.files if name != STATE}
    tensors = {group: _read_group(file) for group, file in groups.items()}
    state = _read_state(path / STATE, manifest.files[STATE].sha256)
    return Checkpoint(manifest.step, manifest.run_id, tensors, state)


def _write_group(draft: Path, group: str, named: Mapping[str, torch.Tensor]) -> str:
    """Write one group as a safetensors file, second names of the same tensor in its metadata; its name."""
    path = draft / f"{group}{SUFFIX}"
    assert plain_name(path.name), f"{group!r} cannot be a file's name"
    crash_point(f"write:{path.name}")
    stored: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first_name: dict[object, str] = {}
    storages: set[tuple[torch.device, int]] = set()
    for name, tensor in named.items():
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        same = (storage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() and same in first_name:
            aliases[name] = first_name[same]
            continue
        first_name[same] = name
        own = tensor.detach().cpu().contiguous()
        # safetensors refuses tensors that overlap: a second view of a storage is stored as a copy
        stored[name] = own.clone() if storage in storages else own
        storages.add(storage)
    try:
        save_file(stored, path, metadata={ALIASES: json.dumps(aliases)} if aliases else None)
    except SafetensorError as error:
        raise operating_system_error(error, path) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes files that only the owner can read
    crash_point(f"written:{path.name}")
    return path.name


def _read_group(path: Path) -> dict[str, torch.Tensor]:
    """The inverse of `_write_group`, for a file whose digest has been checked."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            aliases = json.loads((file.metadata() or {}).get(ALIASES, "{}"))
        for name, stored in aliases.items():
            if name in tensors:
                raise ValueError(f"{name!r} is there twice")
            tensors[name] = tensors[stored]
    except (SafetensorError, OSError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise DamagedError(f"{path} is not a safetensors file that can be trusted: {error!r}") from error
    return tensors


def _read_state(path: Path, sha256: str) -> dict[str, Any]:
    data = read_bounded(path, 1 << 30)
    if hashlib.sha256(data).hexdigest() != sha256:  # of the very bytes that are parsed
        raise DamagedError(f"{path} changed while it was read")
    try:
        state = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is not JSON ({error})") from error
    if not isinstance(state, dict):
        raise DamagedError(f"{path} is not a JSON object")
    return state
