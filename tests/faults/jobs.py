"""The processes of one run, whoever started them: found, sent signals, waited for, and never left behind."""

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    """The processes of one run: its ranks, or the torchrun that has them as children."""

    processes: list[Any]
    ranks: int
    by_torchrun: bool = False
    _seen: dict[int, int] = field(default_factory=dict)

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank; under torchrun those that were there when this was last asked."""
        if not self.by_torchrun:
            return {rank: process.pid for rank, process in enumerate(self.processes)}
        for pid in children(self.processes[0].pid):
            if (rank := environment(pid).get("RANK")) is not None:
                self._seen[int(rank)] = pid
        return self._seen

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
            os.kill(pids[r], number)
        return self

    def kill(self) -> JobEnded:
        """SIGKILL to every rank, and to torchrun, at once."""
        for pid in [*(process.pid for process in self.processes), *self.pids.values()]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        return self.wait()

    def wait(self, seconds: float = 120) -> JobEnded:
        """How it ends. When one rank fails the others have GRACE_S, then they are killed, as srun does."""
        deadline = time.monotonic() + seconds
        waiting = dict(enumerate(self.processes))
        ended: dict[int, Any] = {}
        while waiting:
            for rank, process in list(waiting.items()):
                if not process.is_running:
                    ended[rank] = process.wait()
                    del waiting[rank]
                    if ended[rank].code != 0:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
            if waiting and time.monotonic() > deadline:
                self._give_up(waiting)
            time.sleep(0.01)
        results = [ended[rank] for rank in sorted(ended)]
        said = ["".join(getattr(result, name) for result in results) for name in ("out", "err")]
        return JobEnded([result.code for result in results], *said)

    def _give_up(self, waiting: Mapping[int, Any]) -> None:
        for pid in [*(process.pid for process in waiting.values()), *self.pids.values()]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        for process in waiting.values():
            process.wait()
        raise AssertionError(f"ranks {list(waiting)} did not end: {self._said()}")

    def _said(self) -> str:
        return "\n".join(p.err.read_text()[-3000:] + p.out.read_text()[-1000:] for p in self.processes)


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def children(pid: int) -> list[int]:
    """The processes that any thread of a process started."""
    tasks = Path(f"/proc/{pid}/task")
    files = [task / "children" for task in tasks.iterdir()] if tasks.exists() else []
    return [int(word) for file in files if file.exists() for word in file.read_text().split()]


def descendants(pid: int, depth: int = 99) -> set[int]:
    """The processes that a process started, and theirs, and so on."""
    own = children(pid) if depth else []
    return {*own, *(p for child in own for p in descendants(child, depth - 1))}


def environment(pid: int) -> dict[str, str]:
    """The environment that a process began with; empty where it is gone."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
