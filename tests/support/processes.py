"""Processes of the command, and of scripts, that begin where torch is imported already (`warm.py`)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import torch

from support.fault_jobs import alive, free_port

TORCHRUN = Path(torch.distributed.__file__).with_name("run.py")  # a script, as the command `torchrun` is
RANKS = Path(__file__).with_name("rank_server.py")


def launched(ranks: int) -> list[dict[str, str]]:
    """The variables by which a launcher tells each of some processes on this machine where they meet."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    world["LOCAL_WORLD_SIZE"] = str(ranks)
    return [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


Ask = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Ended:
    """How a process ended: exit code (negative: the signal), and what it printed."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Process:
    """A running `narrowgauge`."""

    pid: int
    out: Path
    err: Path
    ask: Ask

    def send(self, *signals: signal.Signals) -> None:
        """Deliver signals; several of them at one moment, while the process is held."""
        if len(signals) > 1:
            signals = (signal.SIGSTOP, *signals, signal.SIGCONT)
        for number in signals:
            os.kill(self.pid, number)

    def wait(self, seconds: float = 120) -> Ended:
        """How it ends, within n seconds."""
        code = self.ask({"wait": self.pid, "seconds": seconds})
        if code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.ask({"wait": self.pid, "seconds": 10})
            raise AssertionError(f"still running after {seconds} s: {self.err.read_text()[-2000:]}")
        return Ended(code, self.out.read_text(), self.err.read_text())

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return alive(self.pid)

    def until(self, arrived: Callable[[], bool]) -> "Process":
        """Wait for something to be true."""
        deadline = time.monotonic() + 30
        while not arrived():
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.002)
        return self

    def send_when(self, arrived: Callable[[], bool], *signals: signal.Signals) -> Ended:
        """Wait for something to be true, deliver signals, and wait for the end."""
        self.until(arrived).send(*signals)
        return self.wait()

    @property
    def child(self) -> "Process":
        """The process that this one started."""
        pid = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0]
        return replace(self, pid=int(pid))


class Narrowgauge:
    """The command: call it to run it to its end, or `start` it."""

    def __init__(self, ask: Ask, directory: Path) -> None:
        self._ask, self.directory, self.count = ask, directory, 0

    def start(
        self,
        *arguments: str | Path,
        terminal: str = "",
        reader_gone: bool = False,
        largest_file: int = 0,
        memory: int = 0,
        script: str | Path = "",
        reads: str | Path = os.devnull,
        folder: str | Path = "",
        forks: bool = True,
        **environment: str,
    ) -> Process:
        """Output goes to a file, a `terminal` of that name, or a pipe without a reader; limits are in bytes.

        It reads what `reads` holds. A `script` runs in the command's place.

        `forks`: programs in Python that it starts are forked, instead of started again (`support.forked`).
        """
        self.count += 1
        out, err = (self.directory / f"{self.count}.{name}" for name in ("out", "err"))
        job = {
            "arguments": list(map(str, arguments)),
            "environment": environment,
            "directory": str(folder or self.directory),
            "out": terminal or str(out),
            "err": str(err),
            "reader_gone": reader_gone,
            "largest_file": largest_file,
            "memory": memory,
            "script": str(script),
            "reads": str(reads),
            "forks": forks,
        }
        out.touch()
        return Process(self._ask(job), out, err, self._ask)

    def __call__(self, *arguments: str | Path, **more: Any) -> Ended:
        return self.start(*arguments, **more).wait()

    @contextmanager
    def serve(self, script: Path, *arguments: str) -> Iterator[Ask]:
        """Asks a script that reads one JSON job a line, and answers each with a line, while it runs."""
        with TemporaryDirectory() as directory:
            jobs, answers = (Path(directory) / name for name in ("jobs", "answers"))
            os.mkfifo(jobs)
            os.mkfifo(answers)
            process = self.start(*arguments, script=script, reads=jobs, terminal=str(answers))
            with answers.open() as told, jobs.open("w") as asked:  # in the order in which it opens them
                yield asking(asked, told, process.err)
            process.wait()


def asking(asked: TextIO, told: TextIO, said: Path | None = None) -> Ask:
    """The function that writes one JSON job a line, and reads the line that answers it."""

    def ask(job: Mapping[str, Any]) -> Any:
        print(json.dumps(job), file=asked, flush=True)
        line = told.readline()
        assert line, "the process has ended" if said is None else said.read_text()
        return json.loads(line)

    return ask


@contextmanager
def server(*command: str | Path, **how: Any) -> Iterator[Ask]:
    """Asks such a script, in a process of Python of its own."""
    words, pipe = [sys.executable, *map(str, command)], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, **how) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield asking(process.stdin, process.stdout)
        process.stdin.close()


@contextmanager
def warm() -> Iterator[Ask]:
    """The process that has torch imported, for `Narrowgauge`."""
    # A user's output is buffered, whatever the tests' is.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with server(Path(__file__).with_name("warm.py"), env=environment) as ask:
        yield ask
