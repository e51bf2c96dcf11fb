"""The processes of one run, whoever started them: found, sent signals, waited for, and never left behind."""

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
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
    """The processes of one run: its ranks, or the torchrun that has them as children.

    Numbers of processes are used again, and soon on a busy machine. So a process is sent a signal only while
    it is certain to be the one that was started: one of ours until it was waited for, a child of torchrun as
    long as it began when it was first seen.
    """

    processes: list[Any]
    ranks: int
    by_torchrun: bool = False
    _waited: set[int] = field(default_factory=set)  # of `processes`, by index
    _workers: dict[int, psutil.Process] = field(default_factory=dict)  # by rank

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank; under torchrun those that were there when this was last asked."""
        if not self.by_torchrun:
            return {rank: process.pid for rank, process in enumerate(self.processes)}
        if 0 not in self._waited:
            launcher = self.processes[0].pid
            for worker in psutil.Process(launcher).children() if alive(launcher) else ():
                with suppress(psutil.Error):  # it is gone
                    if (rank := worker.environ().get("RANK")) is not None:
                        self._workers[int(rank)] = worker
        return {rank: worker.pid for rank, worker in self._workers.items()}

    @property
    def left(self) -> list[int]:
        """The process ids that are still this job's, and run."""
        unwaited = [p.pid for index, p in enumerate(self.processes) if index not in self._waited]
        workers = [worker.pid for worker in self._workers.values() if worker.is_running()]
        return [pid for pid in [*unwaited, *workers] if alive(pid)]

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
        pids = self.pids
        for r in pids if rank is None else [rank]:
            if pids[r] in self.left:
                os.kill(pids[r], number)
        return self

    def kill(self) -> JobEnded:
        """SIGKILL to every rank, and to torchrun, at once."""
        self._kill_left()
        return self.wait()

    def end(self) -> None:
        """Leave nothing of it behind, whatever has become of it."""
        self._kill_left()
        if len(self._waited) < len(self.processes):
            self.wait()

    def _kill_left(self) -> None:
        assert self.pids is not None  # the workers of torchrun, before it is gone
        for pid in self.left:
            os.kill(pid, signal.SIGKILL)

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
        self._kill_left()
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
