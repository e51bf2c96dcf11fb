"""One process at a time in a run directory.

Two jobs that write into one run destroy both. The lock is the kernel's (`flock` on RUN/.lock), not the
file's existence: it ends with the process, however that ends, so a file left by `kill -9` never blocks.
Processes that are forked while the lock is held share it, and the run is free when the last of them is gone.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from narrowgauge.checkpoint.files import make_directory
from narrowgauge.errors import UserError

LOCK = ".lock"


@contextmanager
def lock_run(directory: Path) -> Iterator[None]:
    """Hold the run directory (made if need be) for the length of a `with`.

    Raises `UserError` that names the holder's process id and host where another process has it, or the
    cause where the directory or its file system cannot be locked.
    """
    try:
        make_directory(directory)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise _unlockable(directory, error) from error
    try:
        _take(descriptor, directory)
        yield
    finally:
        os.close(descriptor)  # frees the lock; the file stays, because removing it could race with a newcomer


def _take(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = (
            os.pread(descriptor, 400, 0).decode(errors="replace").strip() or "a process that just started"
        )
        raise UserError(
            f"{str(directory)!r} is in use by {holder}, and only one process may write into a run; "
            f"wait for it, stop it, or give another directory"
        ) from error
    except OSError as error:
        raise _unlockable(directory, error) from error


def _unlockable(directory: Path, error: OSError) -> UserError:
    return UserError(
        f"{str(directory)!r} cannot be locked ({error.strerror}), and a run needs its directory for itself; "
        f"give a writable directory on a file system that supports flock"
    )
