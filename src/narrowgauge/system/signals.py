"""Handles requests to stop: SIGTERM (a scheduler), SIGINT (Ctrl-C), SIGUSR1 (the time limit is near), SIGHUP
(the terminal has closed, as with ssh); and makes a process die with its launcher.

A run that is asked to stop saves after its current step. Before its first step there is nothing to save, and
it stops at once; while it imports torch or waits for the other ranks it only records the request, because a
rank that exited before it met the others would leave them waiting. The exit code is 75 either way.

A second Ctrl-C, or a signal other than the first, stops the run at once. A repeat of the first does not: a
scheduler that signals every process of a job reaches a run of `compare` twice, directly and through its
parent.

This file imports nothing slow, because signals arrive from the first moment on.
"""

import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from narrowgauge.system.operating_system import stop_signals

COMPARED = "NARROWGAUGE_COMPARED"  # set by `compare` for the runs that it starts

# Each is set by a launcher that is the parent of its processes, or leaves one behind.
_MARKS = (COMPARED, "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_STEP_ID")
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


class Preempted(Exception):
    """The run was asked to stop, has saved, and can be continued: exit code 75."""


class StoppedEarly(KeyboardInterrupt):
    """The run was asked to stop before its first step and has nothing to save: exit code 75."""


class Requests(list[str]):
    """The names of the signals received, in order; an instance is itself their handler."""

    at_once = False  # whether there is nothing to save, so that a request need not wait for a step
    noted_at = math.inf  # arrival of the first, on the clock of `time.monotonic`

    @property
    def number(self) -> int:
        """The number of the first signal, for ranks to agree on; 0 if none came."""
        return signal.Signals[self[0]].value if self else 0

    def nothing_to_save(self) -> None:
        """From now on a request raises `StoppedEarly`; one that has already come does so immediately."""
        self.at_once = True
        if self:
            raise _early(self[0])

    def save_first(self) -> None:
        """From now on a request is recorded, and the run honors it after its step."""
        self.at_once = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record a signal, or stop at once."""
        name = signal.Signals(number).name
        if self and (number == signal.SIGINT or name not in self):
            raise KeyboardInterrupt
        self.append(name)
        self.noted_at = min(self.noted_at, time.monotonic())
        if self.at_once and len(self) == 1:
            raise _early(name)


def _early(name: str) -> StoppedEarly:
    return StoppedEarly(f"{name} before a step was done; rerun the same command to resume")


@contextmanager
def stop_requests(at_the_end: bool = False) -> Iterator[Requests]:
    """Collect requests to stop this process within the block; a nested block yields the same object.

    A run in another thread than the main one cannot be stopped this way; `at_the_end` as in `stop_signals`.
    """
    outer = signal.getsignal(signal.SIGTERM)
    if isinstance(outer, Requests):
        yield outer
        return
    requests = Requests()
    with stop_signals(requests, at_the_end):
        yield requests


def raise_pending_stop(after_s: float = 0.0) -> None:
    """Raise `StoppedEarly` for a request that was recorded at least `after_s` seconds ago.

    With 0, later requests also raise it, since the run has nothing to save yet.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if not isinstance(handler, Requests):
        return
    if not after_s or time.monotonic() - handler.noted_at >= after_s:
        handler.nothing_to_save()


def defer_stops() -> None:
    """Only record further requests, such as torchrun's SIGTERM: the process is already exiting."""
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, Requests):
        handler.save_first()


def is_compared() -> bool:
    """Whether this process is a run of a comparison, which reports the results itself."""
    return bool(os.environ.get(COMPARED))


def die_with_launcher(environ: Mapping[str, str]) -> None:
    """Have the kernel kill this process when its parent exits, if that is a launcher such as torchrun.

    A killed launcher cannot notify its processes; they would continue to train and write. Linux only.
    """
    if sys.platform != "linux" or not any(environ.get(name) for name in _MARKS):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it exited in between, and the kernel will not signal
        os._exit(1)


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that does not belong to this job, and may end a little later."""
    return {name: value for name, value in environ.items() if name not in _MARKS}
