"""Are the files of a directory still those that this process last had in its hands, every byte of them?

To count the valid checkpoints before an old one is removed, each would have to be read again at each save.
A file that this process has written or hashed is taken to be the same as long as its inode, size and
times are: whoever writes into it changes them, and only a disk that loses bits by itself does not. At every
start of a run everything is hashed again.
"""

import os
from pathlib import Path

_Look = frozenset[tuple[str, int, int, int, int]]
_seen: dict[Path, _Look] = {}  # a memory of facts, like a cache: without an entry the files are read again


def add_verified(directory: Path) -> None:
    """Every byte of the directory has just been written or verified."""
    if (look := _look(directory)) is not None:
        _seen[directory.absolute()] = look


def is_verified(directory: Path) -> bool:
    """Whether nothing has touched the directory's files since `add_verified`."""
    look = _look(directory)
    return look is not None and _seen.get(directory.absolute()) == look


def drop_verified(directory: Path) -> None:
    """The directory is gone."""
    _seen.pop(directory.absolute(), None)


def _look(directory: Path) -> _Look | None:
    """Name, inode, size and times of each file; None where there is no such directory."""
    try:
        with os.scandir(directory) as entries:
            stats = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    except OSError:
        return None
    return frozenset((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats)
