"""What exists only on some machines: parts of Python, each imported or named here alone, and Triton.

Linux and macOS are POSIX systems. Windows lacks this kind of file lock (`fcntl`), process limits
(`resource`), SIGUSR1, and directories that can be opened and synced. A run needs all of them to survive a
kill, so on Windows it is refused with a sentence. The library, `recipes`, `formats` and `doctor` work
everywhere.
"""

import os
import re
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from narrowgauge.system.errors import UserError


def _module(name: str) -> Any:
    """A module of the standard library; None if this system lacks it."""
    try:
        return import_module(name)
    except ImportError:
        return None


fcntl, _resource = _module("fcntl"), _module("resource")
IS_POSIX = fcntl is not None

# A scheduler sends SIGTERM, Ctrl-C sends SIGINT, a terminal that closes sends SIGHUP, and SIGUSR1 warns that
# the time limit is near.
_HANG_UP = getattr(signal, "SIGHUP", None)
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)
Handler = Callable[[int, FrameType | None], object]

# Flags of `os.open`; 0 where the system lacks them.
O_DIRECTORY, O_NOFOLLOW, O_NONBLOCK = (
    getattr(os, name, 0) for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK")
)


@contextmanager
def stop_signals(handler: Handler, at_the_end: bool = False) -> Iterator[None]:
    """Within the block, `handler` takes the signals that ask this process to stop.

    Signals reach a process's main thread alone, so in another thread nothing changes. SIGHUP stays ignored if
    it was, as under nohup. With `at_the_end` the process exits after the block, and ignores further signals.
    """

    def hang_up(number: int, frame: FrameType | None) -> None:
        for descriptor in (0, 1, 2):
            with suppress(OSError):  # it is closed
                if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                    os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)  # a lost terminal fails every write
        handler(number, frame)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = [n for n in STOP_SIGNALS if n != _HANG_UP or signal.getsignal(n) != signal.SIG_IGN]
    previous = {
        n: signal.signal(n, hang_up if n == _HANG_UP else handler) for n in (numbers if is_main else ())
    }
    try:
        yield
    finally:
        for n, former in previous.items():
            signal.signal(n, signal.SIG_IGN if at_the_end else former)


def system_name() -> str:
    """The operating system's usual name: Linux, macOS or Windows."""
    return {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)


def require_posix(what: str) -> None:
    """Refuse a command, such as "train", that needs file locks, directory syncs or a scheduler's signals."""
    if not IS_POSIX:
        raise UserError(
            f"{what} needs Linux or macOS: {system_name()} lacks the file locks and signals by which a run "
            "survives a kill; use WSL 2 (Windows Subsystem for Linux). Here, the library (ng.convert, "
            "ng.quantize), doctor, recipes and formats work"
        )


def user_id() -> int:
    """The numeric id of the user who runs this process; 0 where users have none."""
    return os.geteuid() if IS_POSIX else 0


def is_private(status: os.stat_result) -> bool:
    """Whether this user owns a file or directory and no other user can write to it.

    Where the system has no modes (Windows), a user's folders count as private.
    """
    return not IS_POSIX or (status.st_uid == user_id() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def limits_of(name: str) -> tuple[int | None, int | None]:
    """The soft and hard limit of a resource such as RLIMIT_NOFILE for this process; None if unlimited."""
    if _resource is None:
        return None, None
    soft, hard = _resource.getrlimit(getattr(_resource, name))
    unlimited = _resource.RLIM_INFINITY
    return (None if soft == unlimited else soft), (None if hard == unlimited else hard)


def peak_memory_held() -> int:
    """Peak memory of this process in bytes; 0 where the system does not report it."""
    if _resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return int(_resource.getrusage(_resource.RUSAGE_SELF).ru_maxrss) * unit


def _seconds_used() -> tuple[float, float, float]:
    """The clock, and the CPU seconds of this process with its children and of all processes on our cores.

    Idle time and low-priority (nice) processes, which give way, do not count. Outside Linux other processes
    are unknown: the last two are equal.
    """
    own = sum(os.times()[:4])
    with suppress(OSError, ValueError, AttributeError):
        cores = {f"cpu{i}" for i in os.sched_getaffinity(0)}
        with open("/proc/stat", encoding="ascii") as f:
            rows = [line.split() for line in f if line.partition(" ")[0] in cores]
        # user, nice, system, idle, iowait, irq, softirq
        ticks = sum(int(row[i]) for row in rows for i in (1, 3, 6, 7))
        return time.monotonic(), own, ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), own, own


_AT_START = _seconds_used()  # torch is imported after this; the measurement covers that import


def cores_of_others() -> float:
    """How many of our cores other programs used, on average since this module was imported."""
    clock, own, used = (now - before for now, before in zip(_seconds_used(), _AT_START, strict=True))
    return max(0.0, used - own) / clock if clock > 0.5 else 0.0


def triton_version() -> str:
    """Triton's version, "unknown" if the module does not say; "" where there is none.

    It is not imported, which takes a second and would choose its interpreter or compiler; and its packages
    have several names: `triton` for NVIDIA, `pytorch-triton-rocm` or `triton-rocm` for AMD.
    """
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return ""
    source = Path(spec.origin).read_text(encoding="utf-8")
    found = re.search(r"""^__version__ = ['"]([^'"]+)""", source, re.MULTILINE)
    return found[1] if found else "unknown"
