"""A lock that allows one run at a time in a run directory.

Two jobs that write into one run destroy both. The kernel holds the lock (`flock` on RUN/.lock); the existence
of the file means nothing. The lock ends with the process, however that ends, so a file left by `kill -9`
never blocks. Processes forked while the lock is held share it, and the run is free when the last of them has
ended.

The ranks of a run share a second lock (RUN/.lock-ranks), which each holds as long as it lives. So a run whose
rank 0 was killed is still in use while any other rank writes, on any machine, as far as `flock` works across
the file system. Rank 0 holds the first lock, and takes it only if no rank holds the second.
"""

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import make_directory
from narrowgauge.system.operating_system import O_NOFOLLOW, fcntl

LOCK, RANKS = ".lock", ".lock-ranks"
_FLAGS = os.O_RDWR | os.O_CREAT | O_NOFOLLOW | os.O_APPEND


@contextmanager
def lock_run(directory: Path, rank: int = 0, barrier: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the run directory, made if it does not exist, in a `with`. All ranks of a run call this.

    `barrier` waits until all ranks have reached it; None: this process is alone.
    """
    own_line = f"process {os.getpid()} on host {socket.gethostname()}\n".encode()
    with _opened(directory, LOCK) as lock, _opened(directory, RANKS) as ranks:
        if rank == 0:
            _take(lock, lock, directory, fcntl.LOCK_EX)
            _take(ranks, lock, directory, fcntl.LOCK_EX)  # no rank of another run is left
            os.ftruncate(lock, 0)
            os.write(lock, own_line)  # the first line, which messages name
            fcntl.flock(ranks, fcntl.LOCK_UN)
        if barrier is not None:
            barrier()  # rank 0 holds the first lock
            _take(ranks, lock, directory, fcntl.LOCK_SH)
        if rank != 0:
            os.write(lock, own_line)
        if barrier is not None:
            barrier()  # all ranks hold the second lock
        yield


def is_abandoned(directory: Path) -> bool:
    """Whether the lock of a run directory names only processes of this host, all of which have ended.

    Nothing is locked, because a query must not keep a run from starting. Without /proc, or if a process ran
    on another host, the answer is False.
    """
    try:
        lines = (directory / LOCK).read_text(errors="replace").splitlines()
    except OSError:
        return False
    return Path("/proc/self").exists() and not any(map(_may_be_alive, lines))


@contextmanager
def _opened(directory: Path, name: str) -> Iterator[int]:
    try:
        make_directory(directory)
        descriptor = os.open(directory / name, _FLAGS, 0o666)
    except OSError as error:
        raise _unlockable(directory, error) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)  # frees the lock; the file stays, because removing it could race with a newcomer


def _take(descriptor: int, names: int, directory: Path, operation: int) -> None:
    """Take a lock, or refuse with the holder listed in the file `names`."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"{str(directory)!r} is in use by {_holder(names)}, and only one run may write into it; "
            f"wait for it, stop it, or give another directory"
        ) from error
    except OSError as error:
        raise _unlockable(directory, error) from error


def _holder(descriptor: int) -> str:
    """The first process in the file that may be alive; processes of this host are checked."""
    lines = os.pread(descriptor, 2**20, 0).decode(errors="replace").splitlines()
    for line in lines:
        if _may_be_alive(line):
            return line
    return lines[0] if lines else "a process that just started"


def _may_be_alive(line: str) -> bool:
    """Whether the process on a line of the lock may be alive; a process of this host is checked."""
    match = re.fullmatch(r"process (\d+) on host (.*)", line)
    return match is not None and (match[2] != socket.gethostname() or _is_alive(match[1]))


def _is_alive(number: str) -> bool:
    """Whether a process of this host is alive. A zombie (Z) has ended and holds nothing."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return Path(f"/proc/{number}").exists()


def _unlockable(directory: Path, error: OSError) -> UserError:
    if directory.is_file():
        return UserError(f"{str(directory)!r} is a file, but a run needs a directory; give another name")
    if not directory.is_dir():
        return UserError(
            f"directory {str(directory)!r} cannot be made ({error.strerror}); name one that can be written"
        )
    return UserError(
        f"{str(directory)!r} cannot be locked ({error.strerror}), and a run needs its directory for itself; "
        f"give a writable directory on a file system that supports flock"
    )
