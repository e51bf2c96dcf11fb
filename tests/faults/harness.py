"""Runs to be disturbed, on one rank or several, and the same runs undisturbed to compare them with.

One rank is `narrowgauge train ...`. Several are started either as srun starts them, each a process with RANK
and its kin in the environment (`start`), or by torchrun (`torchrun`). Both are processes of their own; that
they are forked from one that has torch imported (`tests/warm.py`) saves seconds and nothing else.
"""

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from narrowgauge.checkpoint import load, steps

INJECT = Path(__file__).with_name("inject.py")
TORCHRUN = Path(torch.distributed.__file__).with_name("run.py")
SHUTDOWN_S = 3  # how long torchrun waits for workers that it told to stop
GRACE_S = 30  # how long ranks may take to notice that another one is gone

# 24 steps of four sequences cross two epochs, of some 35 sequences; a stop can fall between any two saves.
RUN = {
    "model.dim": 64,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.ffn_dim": 128,
    "training.steps": 24,
    "training.batch_size": 4,
    "checkpoint.every": 5,
    "validation.every": 7,
    "gauges.every": 0,
    "log.every": 1,
}
# In a model whose matrices are large enough for narrow moments and blocks of 128.
WIDE = {"model.dim": 128, "model.ffn_dim": 256, "training.batch_size": 2}


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


class Runs:
    """Command lines, the runs they make undisturbed, and jobs."""

    def __init__(self, narrowgauge: Any, line: Any, look: Any, directory: Path) -> None:
        self.narrowgauge, self.line, self.look, self.directory = narrowgauge, line, look, directory
        self._undisturbed: dict[str, tuple[Path, float]] = {}
        self._jobs: list[Job] = []

    def end_all(self) -> None:
        """Leave no process behind, however the test ended."""
        for job in self._jobs:
            if any(process.is_running for process in job.processes) or any(map(alive, job.pids.values())):
                job.kill()
        self._jobs.clear()

    def words(self, changes: Mapping[str, Any] | None = None) -> list[str]:
        """The command line of a run, without --out."""
        return self.line({**RUN, **(changes or {})})

    def start(
        self, words: list[str], out: Path, ranks: int = 1, faults: list[Mapping[str, Any]] = (), **more: Any
    ) -> Job:
        """Start it on so many ranks, with `inject.py`'s faults; `more` is that of the command's fixture."""
        if faults:
            more |= {"script": INJECT, "FAULTS": json.dumps(list(faults))}
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        processes = []
        for rank in range(ranks):
            own = world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
            environ = own if ranks > 1 else {}
            processes.append(self.narrowgauge.start(*words, "--out", out, **{**environ, **more}))
        self._jobs.append(Job(processes, ranks))
        return self._jobs[-1]

    def torchrun(
        self, words: list[str], out: Path, ranks: int, faults: list[Mapping[str, Any]] = (), **more: str
    ) -> Job:
        """Start it by torchrun."""
        program = [str(INJECT)] if faults else ["-m", "narrowgauge"]
        more |= {"FAULTS": json.dumps(list(faults)), "OMP_NUM_THREADS": "1"}
        options = ["--standalone", f"--nproc-per-node={ranks}", f"--shutdown-timeout={SHUTDOWN_S}"]
        arguments = [*options, *program, *words, "--out", out]
        process = self.narrowgauge.start(*arguments, script=TORCHRUN, **more)
        self._jobs.append(Job([process], ranks, by_torchrun=True))
        return self._jobs[-1]

    def finish(self, words: list[str], out: Path, ranks: int = 1, **more: Any) -> JobEnded:
        """Run it to its end, which must be a good one."""
        ended = self.start(words, out, ranks, **more).wait()
        assert set(ended.codes) == {0}, ended.err
        return ended

    def undisturbed(self, changes: Mapping[str, Any] | None = None, ranks: int = 1) -> Any:
        """The run that nobody disturbed, made once; to be read only."""
        return self.look(self._made(changes, ranks)[0])

    def seconds(self, changes: Mapping[str, Any] | None = None, ranks: int = 1) -> float:
        """How long the undisturbed run took."""
        return self._made(changes, ranks)[1]

    def _made(self, changes: Mapping[str, Any] | None, ranks: int) -> tuple[Path, float]:
        key = json.dumps([changes or {}, ranks], sort_keys=True, default=str)
        if key not in self._undisturbed:
            out, start = self.directory / f"undisturbed-{len(self._undisturbed)}", time.monotonic()
            self.finish(self.words(changes), out, ranks)
            self._undisturbed[key] = out, time.monotonic() - start
        return self._undisturbed[key]

    def copy(self, to: Path, changes: Mapping[str, Any] | None = None, ranks: int = 1) -> Any:
        """A copy of the undisturbed run that takes itself for unfinished, to be damaged and continued."""
        shutil.copytree(self._made(changes, ranks)[0], to)
        (to / "status.json").unlink()
        return self.look(to)


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


def newest(run: Path) -> Path:
    """The newest published step of a run."""
    return run / "checkpoints" / f"step-{steps(run / 'checkpoints')[-1]}"


def state(step: Path, *groups: str) -> dict[str, torch.Tensor]:
    """Every tensor of these groups of a checkpoint (none named: of all), whole."""
    tensors = load(step).tensors
    return {f"{group}: {name}": t for group in groups or tensors for name, t in tensors[group].items()}


def assert_same_bits(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> None:
    """Check that tensors have the same names, dtypes, shapes and bits."""
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert (tensor.dtype, tensor.shape) == (b[name].dtype, b[name].shape), name
        mine, theirs = (t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, b[name]))
        assert torch.equal(mine, theirs), name


def flip_a_bit(file: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def contents(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of all files below a directory, in order."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            yield str(path.relative_to(directory)), path.read_bytes()
