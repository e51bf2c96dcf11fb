"""Disk space for checkpoints, checked before the first step of a run and before each save.

A disk can run out of two things: bytes and inodes (one for each file and directory). Some file systems create
inodes on demand and report none; there only bytes count.

A run keeps `checkpoint.keep` checkpoints and writes the next one before it deletes the oldest, so it needs
space for one more than it keeps. Before the first step it is easy to choose another disk.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.system.errors import Failed, UserError
from narrowgauge.system.units import human_bytes
from narrowgauge.trainer.checkpoint.store.commit import steps


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
