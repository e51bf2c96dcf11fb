"""Runs to be disturbed, on one rank or several, and the same runs undisturbed to compare them with.

One rank is `narrowgauge train ...`. Several are started either as srun starts them, each a process with RANK
and its kin in the environment (`start`), or by torchrun (`torchrun`). Both are separate processes; that
they are forked from one that has torch imported (`warm.py`) saves seconds and nothing else.
"""

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.trainer.checkpoint import load, steps
from support.fault_jobs import Job, JobEnded
from support.processes import TORCHRUN, launched

INJECT = Path(__file__).parents[1] / "faults" / "inject.py"
SHUTDOWN_S = 3  # how long torchrun waits for workers that it has asked to stop

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


class Runs:
    """Command lines, the runs they make undisturbed, and jobs."""

    def __init__(self, narrowgauge: Any, line: Any, look: Any, directory: Path) -> None:
        self.narrowgauge, self.line, self.look, self.directory = narrowgauge, line, look, directory
        self._undisturbed: dict[str, tuple[Path, float]] = {}
        self._jobs: list[Job] = []

    def end_all(self) -> None:
        """Leave no process behind, however the test ended."""
        for job in self._jobs:
            job.end()
        self._jobs.clear()

    def words(self, changes: Mapping[str, Any] | None = None) -> list[str]:
        """The command line of a run, without --out."""
        return self.line({**RUN, **(changes or {})})

    def start(
        self, words: list[str], out: Path, ranks: int = 1, faults: list[Mapping[str, Any]] = (), **more: Any
    ) -> Job:
        """Start it on n ranks, with `inject.py`'s faults; `more` is that of the command's fixture."""
        if faults:
            more |= {"script": INJECT, "FAULTS": json.dumps(list(faults))}
        environments = launched(ranks) if ranks > 1 else [{}]
        start = self.narrowgauge.start
        self._jobs.append(Job([start(*words, "--out", out, **{**own, **more}) for own in environments]))
        return self._jobs[-1]

    def torchrun(self, words: list[str], out: Path, ranks: int) -> Job:
        """Start it by torchrun."""
        options = ["--standalone", f"--nproc-per-node={ranks}", f"--shutdown-timeout={SHUTDOWN_S}"]
        arguments = [*options, "-m", "narrowgauge", *words, "--out", out]
        # The ranks are started again, and their first environment then distinguishes them.
        self._jobs.append(Job([self.narrowgauge.start(*arguments, script=TORCHRUN, forks=False)]))
        return self._jobs[-1]

    def finish(self, words: list[str], out: Path, ranks: int = 1, **more: Any) -> JobEnded:
        """Run it to its end, which must be a good one."""
        ended = self.start(words, out, ranks, **more).wait()
        assert set(ended.codes) == {0}, ended.err
        return ended

    def undisturbed(self, changes: Mapping[str, Any] | None = None, ranks: int = 1) -> Any:
        """The undisturbed run, made once; to be read only."""
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


@pytest.fixture(scope="session")
def _runs(narrowgauge: Any, line: Any, look: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(narrowgauge, line, look, tmp_path_factory.mktemp("faults"))


@pytest.fixture
def runs(_runs: Runs) -> Iterator[Runs]:
    """Those that are undisturbed are shared by all tests of a session."""
    yield _runs
    _runs.end_all()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run directory to be."""
    return tmp_path / "run"


def stop_in(step: int) -> dict[str, Any]:
    """The fault of being asked to stop inside a step."""
    return {"kind": "signals", "name": "SIGTERM", "steps": [step]}


def continues(runs: Runs, out: Path, changes: Any, ranks: int = 1, **more: Any) -> JobEnded:
    """The same line once more: it ends as the undisturbed run does, and leaves no draft."""
    ended = runs.finish(runs.words(changes), out, ranks, **more)
    assert runs.look(out).trajectory == runs.undisturbed(changes, ranks).trajectory
    assert runs.look(out).status["status"] == "done"
    assert not list((out / "checkpoints").glob("*.tmp-*"))
    return ended


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
