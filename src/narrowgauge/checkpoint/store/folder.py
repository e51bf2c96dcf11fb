"""A folder for other programs, made whole or not at all.

It is filled under a temporary name, every file is synced, then it is renamed and its parent is synced:
whoever looks finds nothing or everything (`files.py` has the three facts behind this).
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from narrowgauge.errors import UserError
from narrowgauge.files import crash_point, fsync_directory, make_directory


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `path` when the block ends well and vanishes otherwise.

    Raises `UserError` where something is there already, and `OSError` where it cannot be written.
    """
    path = Path(os.path.abspath(path))
    _refuse_existing(path)
    make_directory(path.parent)
    staging = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    staging.mkdir()
    try:
        yield staging
        _sync(staging)
        crash_point("exchange:filled")
        _refuse_existing(path)
        os.rename(staging, path)  # takes the place of an empty folder, never of a filled one
        crash_point("exchange:renamed")
        fsync_directory(path.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _refuse_existing(path: Path) -> None:
    is_empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    if os.path.lexists(path) and not is_empty:
        raise UserError(f"{path} is there already, and nothing is ever overwritten; name another with --out")


def _sync(folder: Path) -> None:
    """Bring every file and name below `folder` to the disk, readable as the folder itself is."""
    for here, _, names in os.walk(folder, topdown=False):
        for name in names:
            file = Path(here, name)
            file.chmod(folder.stat().st_mode & 0o666)  # safetensors makes files that only the owner can read
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        fsync_directory(Path(here))
