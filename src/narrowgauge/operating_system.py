"""The parts of Python that exist on some operating systems only, each imported or named here alone.

Linux and macOS are POSIX systems. Windows has no file locks of this kind (`fcntl`), no limits of a process
(`resource`), no SIGUSR1, and no directory that could be opened and synced. A run needs all of them to
survive a kill, so that it is refused there in a sentence. The library, `recipes`, `formats` and `doctor`
work everywhere.
"""

import os
import signal
import stat
import sys
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

from narrowgauge.errors import UserError


def _module(name: str) -> Any:
    """A module of the standard library; None where this system has no such module."""
    try:
        return import_module(name)
    except ImportError:
        return None


fcntl, _resource = _module("fcntl"), _module("resource")
IS_POSIX = fcntl is not None

# A scheduler asks by SIGTERM, Ctrl-C is SIGINT, and SIGUSR1 tells that the time limit is near.
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)

# Flags of `os.open`; 0 where the system has no such rule.
O_DIRECTORY, O_NOFOLLOW, O_NONBLOCK = (
    getattr(os, name, 0) for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK")
)


def system_name() -> str:
    """The operating system's name for people: Linux, macOS or Windows."""
    return {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)


def require_posix(what: str) -> None:
    """Refuse what locks files, syncs directories or answers to a scheduler's signals, where there are none.

    Args:
        what: The beginning of the sentence, such as "train".

    Raises:
        UserError: the system is none of POSIX's.
    """
    if not IS_POSIX:
        raise UserError(
            f"{what} needs Linux or macOS: {system_name()} lacks the file locks and signals by which a run "
            "survives a kill; use WSL 2 (Windows Subsystem for Linux). Here, the library (ng.convert, "
            "ng.quantize), doctor, recipes and formats work"
        )


def user_id() -> int:
    """The number of the user who runs this process; 0 where users have none."""
    return os.geteuid() if IS_POSIX else 0


def is_private(status: os.stat_result) -> bool:
    """Whether a file or directory is this user's and no other user can write to it.

    Where modes do not say (Windows), a user's folders are taken for private.
    """
    return not IS_POSIX or (status.st_uid == user_id() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def limits_of(name: str) -> tuple[int | None, int | None]:
    """The soft and hard limit of this process, such as RLIMIT_NOFILE; None: unlimited."""
    if _resource is None:
        return None, None
    soft, hard = _resource.getrlimit(getattr(_resource, name))
    unlimited = _resource.RLIM_INFINITY
    return (None if soft == unlimited else soft), (None if hard == unlimited else hard)


def peak_memory_held() -> int:
    """The most bytes of memory that this process has held; 0 where the system does not tell."""
    if _resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return int(_resource.getrusage(_resource.RUSAGE_SELF).ru_maxrss) * unit


def _seconds_used() -> tuple[float, float, float]:
    """The clock, the seconds that this process and its children computed, and those of all on our cores.

    Idle time and programs of low priority, which give way, do not count. Outside of Linux nothing is known of
    others: the last two are equal.
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


_AT_START = _seconds_used()  # torch is imported after this, and the seconds of that are what is looked at


def cores_of_others() -> float:
    """The number of our cores that other programs used, on average since this module was imported."""
    clock, own, used = (now - before for now, before in zip(_seconds_used(), _AT_START, strict=True))
    return max(0.0, used - own) / clock if clock > 0.5 else 0.0
