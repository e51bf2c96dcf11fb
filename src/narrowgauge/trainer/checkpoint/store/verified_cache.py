"""A cache of directories in which this process has written or verified every byte.

Without it, counting the valid checkpoints before an old one is removed would read each of them at each save.
A file that this process has written or hashed is assumed unchanged while its inode, size and times are: a
writer changes them, and only a disk that loses bits by itself does not. At every start of a run everything is
hashed again.
"""

import os
from pathlib import Path

_Fingerprint = frozenset[tuple[str, int, int, int, int]]
_verified: dict[Path, _Fingerprint] = {}  # without an entry the files are read again


def add_verified(directory: Path) -> None:
    """Record that every byte of the directory has just been written or verified."""
    if (fingerprint := _fingerprint(directory)) is not None:
        _verified[directory.absolute()] = fingerprint


def is_verified(directory: Path) -> bool:
    """Whether nothing has touched the directory's files since `add_verified`."""
    fingerprint = _fingerprint(directory)
    return fingerprint is not None and _verified.get(directory.absolute()) == fingerprint


def drop_verified(directory: Path) -> None:
    """Forget a directory that is being removed."""
    _verified.pop(directory.absolute(), None)


def _fingerprint(directory: Path) -> _Fingerprint | None:
    """Name, inode, size and times of each file; None if the directory does not exist."""
    try:
        with os.scandir(directory) as entries:
            stats = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    except OSError:
        return None
    return frozenset((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats)
