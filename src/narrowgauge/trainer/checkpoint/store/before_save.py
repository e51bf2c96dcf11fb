"""What is checked before a checkpoint is written: its content is finite, and the disk has space.

A NaN in a checkpoint outlives the run that produced it: every resume starts from it. The check is therefore
here, just before the write, whatever the training loop has checked before.

A disk can run out of two things: bytes and inodes (one for each file and directory). Some file systems create
inodes on demand and report none; there only bytes count.

A run keeps `checkpoint.keep` checkpoints and writes the next one before it deletes the oldest, so it needs
space for one more than it keeps. Before the first step it is easy to choose another disk.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from narrowgauge.system.errors import Failed, UserError
from narrowgauge.system.units import human_bytes
from narrowgauge.trainer.checkpoint.store.commit import steps

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
Tensors: TypeAlias = Mapping[str, Mapping[str, torch.Tensor]]  # group -> name -> tensor


class PoisonedError(UserError, Failed):
    """A tensor or value to be saved is not finite."""

    exit_code = 1


def refuse_non_finite(tensors: Tensors, state: Mapping[str, JSON]) -> None:
    """Refuse tensors and values that are not finite; the `PoisonedError` names the first of them."""
    bad = [
        f"tensor {name!r} of {group!r}"
        for group, named in tensors.items()
        for name, tensor in named.items()
        if not is_finite(tensor)
    ]
    bad += [f"state{key}" for key in _non_finite_numbers(state)]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise PoisonedError(
            f"not saved: {bad[0]}{more} holds a NaN or an infinity, and nothing non-finite is ever "
            f"published; go back to the last checkpoint"
        )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is a NaN or an infinity: one pass, without a temporary of the tensor's size."""
    t = tensor.detach()
    if t.is_complex():
        t = torch.view_as_real(t)
    if not t.is_floating_point() or t.numel() == 0 or t.dtype is torch.float4_e2m1fn_x2:  # FP4 is all finite
        return True
    if t.element_size() == 1:  # FP8 has no minimum in torch: count the codes, and look up the non-finite ones
        counts = torch.bincount(t.contiguous().view(torch.uint8).flatten(), minlength=256)
        codes = torch.arange(256, dtype=torch.uint8, device=t.device)
        return not counts[~codes.view(t.dtype).float().isfinite()].any()
    low, high = torch.aminmax(t)  # a NaN anywhere makes both NaN
    return math.isfinite(low) and math.isfinite(high)


def _non_finite_numbers(value: JSON, key: str = "") -> list[str]:
    """Locations, written as in Python (`['a'][0]`), of the floats that are not finite."""
    if isinstance(value, float):
        return [] if math.isfinite(value) else [key]
    if isinstance(value, Mapping):
        assert all(isinstance(name, str) for name in value), "JSON turns other keys into strings"
        return [p for name, v in value.items() for p in _non_finite_numbers(v, f"{key}[{name!r}]")]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [p for index, v in enumerate(value) for p in _non_finite_numbers(v, f"{key}[{index}]")]
    return []


class SaveError(UserError, Failed):
    """A checkpoint could not be written. The older ones are untouched, and training can continue."""

    exit_code = 1


@dataclass(frozen=True)
class DiskSpace:
    """Bytes and inodes; `inodes` is None if the file system has no fixed number of them."""

    bytes: int
    inodes: int | None

    def times(self, count: int) -> "DiskSpace":
        """The space for `count` copies."""
        return DiskSpace(self.bytes * count, None if self.inodes is None else self.inodes * count)

    def fits_in(self, free: "DiskSpace") -> bool:
        """Whether enough bytes and inodes are free."""
        known = self.inodes is not None and free.inodes is not None
        return self.bytes <= free.bytes and (not known or (self.inodes or 0) <= (free.inodes or 0))

    def __str__(self) -> str:
        return human_bytes(self.bytes) + ("" if self.inodes is None else f" and {self.inodes} inodes")


def free_space(path: Path) -> DiskSpace:
    """What this user can still write under a path, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    disk = os.statvfs(path)
    return DiskSpace(disk.f_bavail * disk.f_frsize, disk.f_favail if disk.f_files else None)


def require_space(directory: Path, needed: DiskSpace) -> None:
    """A `SaveError` unless the disk of a directory, which need not exist yet, has space for a checkpoint."""
    free = free_space(directory)
    if not needed.fits_in(free):
        raise SaveError(
            f"{str(directory)!r} needs {needed} for a checkpoint, and its disk has {free} free; free some, "
            f"lower checkpoint.keep or name another disk with --out"
        )


def require_space_for_run(directory: Path, needed: DiskSpace, keep: int) -> None:
    """Check that the disk has space for the `keep` checkpoints of a run, including any that already exist."""
    count = keep + 1 - min(keep, len(steps(directory)))
    free = free_space(directory)
    if not needed.times(count).fits_in(free):
        raise UserError(
            f"{str(directory)!r} needs {needed.times(count)}, for {count} more checkpoints of {needed} "
            f"(checkpoint.keep = {keep}, and one that is being made), and its disk has {free} free; free "
            "some, lower checkpoint.keep, or name a directory on another disk with --out"
        )
