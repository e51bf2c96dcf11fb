"""Is there room for a checkpoint? Asked before the first step and before each save.

A disk has two things that run out: bytes and inodes (one for each file and directory). Some file systems
make inodes as they need them and report none; there only bytes count.
"""

import os
from pathlib import Path

from narrowgauge.errors import UserError


class SaveError(UserError):
    """A checkpoint could not be written. The older ones are untouched, and training can go on."""

    exit_code = 1


def require_space(directory: Path, bytes_: int, files: int) -> None:
    """Check that a directory's disk has room for more.

    Args:
        directory: where they are to go; it need not be there yet.
        bytes_: that will be written.
        files: and directories, that will be made.

    Raises:
        SaveError: with what is needed and what is free.
        OSError: the file system cannot be asked.
    """
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    disk = os.statvfs(there)
    free, inodes = disk.f_bavail * disk.f_frsize, disk.f_favail
    if free < bytes_:
        raise SaveError(
            f"{str(directory)!r} needs {_amount(bytes_)} for a checkpoint, and its disk has {_amount(free)} "
            f"free; free some, lower checkpoint.keep or name another disk with --out"
        )
    if disk.f_files and inodes < files:
        raise SaveError(
            f"{str(directory)!r} needs {files} inodes for a checkpoint, and its disk has {inodes} free; "
            f"remove files there or name another disk with --out"
        )


def _amount(bytes_: int) -> str:
    """Bytes for people, who also compare: 1.50 GiB (1610612736 bytes)."""
    return f"{bytes_ / 2**30:.2f} GiB ({bytes_} bytes)"
