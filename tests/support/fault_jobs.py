"""The processes of one run, whoever started them: sent signals, waited for, and never left behind."""

import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

GRACE_S = 30  # how long ranks may take to notice that another one is gone


@dataclass(frozen=True)
class JobEnded:
    """How a job ended: the exit code of each process that was started for it, and all that they printed."""

    codes: list[int]
    out: str
    err: str

    @property
    def failed(self) -> bool:
        return all(code != 0 for code in self.codes)


@dataclass
class Job:
    """The processes of one run, one a rank, or the torchrun that starts them.

    Numbers of processes are used again, and soon on a busy machine. So a process is sent a signal only until
    it was waited for.
    """

    processes: list[Any]
    _waited: set[int] = field(default_factory=set)  # of `processes`, by index

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in enumerate(self.processes)}

    @property
    def left(self) -> list[int]:
        """The process ids that are still this job's, and run."""
        return [p.pid for index, p in enumerate(self.processes) if index not in self._waited and p.is_running]

    def until(self, arrived: Callable[[], bool], seconds: float = 60) -> "Job":
        """Wait for something to be true."""
        deadline = time.monotonic() + seconds
        while not arrived():
            assert time.monotonic() < deadline, self._said()
            assert any(process.is_running for process in self.processes), self._said()
            time.sleep(0.002)
        return self

    def send(self, number: signal.Signals, rank: int | None = None) -> "Job":
        """A signal to one rank, or to all of them."""
        left = self.left
        for pid in left if rank is None else [self.pids[rank]]:
            if pid in left:
                os.kill(pid, number)
        return self

    def kill(self) -> JobEnded:
        """SIGKILL to every rank, or to torchrun, at once."""
        return self.send(signal.SIGKILL).wait()

    def end(self) -> None:
        """Leave nothing of it behind, whatever has become of it."""
        if len(self._waited) < len(self.processes):
            self.kill()

    def wait(self, seconds: float = 120) -> JobEnded:
        """How it ends. When one rank fails the others have GRACE_S, then they are killed, as srun does."""
        deadline = time.monotonic() + seconds
        ended: dict[int, Any] = {}
        while len(ended) < len(self.processes):
            for index, process in enumerate(self.processes):
                if index not in ended and not process.is_running:
                    self._waited.add(index)
                    ended[index] = process.wait()
                    if ended[index].code != 0:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
            if len(ended) < len(self.processes) and time.monotonic() > deadline:
                self._give_up(set(range(len(self.processes))) - ended.keys())
            time.sleep(0.01)
        results = [ended[index] for index in sorted(ended)]
        said = ["".join(getattr(result, name) for result in results) for name in ("out", "err")]
        return JobEnded([result.code for result in results], *said)

    def _give_up(self, waiting: set[int]) -> None:
        self.send(signal.SIGKILL)
        for index in waiting:
            self._waited.add(index)
            self.processes[index].wait()
        raise AssertionError(f"ranks {sorted(waiting)} did not end: {self._said()}")

    def _said(self) -> str:
        return "\n".join(p.err.read_text()[-3000:] + p.out.read_text()[-1000:] for p in self.processes)


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int, depth: int = 2) -> set[int]:
    """The processes that a process started; below the first generation, all of theirs as well."""
    return {child.pid for child in psutil.Process(pid).children(recursive=depth > 1)}
