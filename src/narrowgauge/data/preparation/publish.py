"""How does a file, or a directory, appear whole or not at all?

It is written aside, under a name that nobody reads, brought to the disk (`fsync`), and renamed. POSIX makes
the rename one event: whoever looks sees nothing or everything, and a process killed at any moment leaves
at most something under the name aside. The folder is synced last, for the rename to survive a power cut.
"""

import errno
import glob
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

_ABANDONED_S = 3600.0  # a build that wrote nothing for an hour belongs to a process that is gone


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file for writing, which becomes `path` when the block ends well and vanishes otherwise."""
    aside = _aside(path)
    try:
        with aside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        _sync_directory(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `path` when the block ends well and vanishes otherwise.

    If `path` has come to be meanwhile, made by another process, that one stays and ours vanishes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    aside = _aside(path)
    aside.mkdir()
    try:
        yield aside
        _sync_directory(aside)
        _rename_unless_filled(aside, path)
        _sync_directory(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _aside(path: Path, nonce: str | None = None) -> Path:
    return path.with_name(f".{path.name}.building-{nonce or uuid4().hex}")


def _rename_unless_filled(aside: Path, path: Path) -> None:
    try:
        os.rename(aside, path)  # replaces an empty folder; refuses to replace a filled one
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _remove_abandoned(path: Path) -> None:
    """Delete what builds of `path` left behind when they were killed."""
    pattern = _aside(Path(glob.escape(path.name)), nonce="*").name
    for aside in path.parent.glob(pattern):
        try:
            newest = max(entry.stat().st_mtime for entry in (aside, *aside.iterdir()))
        except OSError:  # its builder is alive after all and has just published or removed it
            continue
        if time.time() - newest > _ABANDONED_S:
            shutil.rmtree(aside, ignore_errors=True)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
