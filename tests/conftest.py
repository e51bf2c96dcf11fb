"""A small corpus, a tiny configuration, and the command in processes of its own."""

import os

# One thread a process, in this one and in all that it starts: the tests are many processes on few cores, whose
# threads would wait for each other. Here, before anything imports torch, for `make test` and a bare pytest alike.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
    os.environ.setdefault(name, "1")

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.checkpoint import read_manifest, steps
from support.expectations import VARIABLE, keep_expectations

pytest_plugins = ["faults.report", "golden.report"]

# A shell that starts the tests in the background lets them ignore Ctrl-C; what they start would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes by itself begins first, beside the others and not after them."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")


WORDS = ["narrow", "gauge", "rail", "train", "coal", "steam", "valley", "signal"]


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Prepared corpora go here, and never to the user's cache."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NARROWGAUGE_CACHE", str(directory))
        yield directory


@pytest.fixture(scope="session", autouse=True)
def _expectations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a step is expected to take is worked out once for each kind of step."""
    directory = tmp_path_factory.mktemp("expectations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(directory))
        keep_expectations(directory, patch)
        yield


def write_text(directory: Path, documents: int = 12, seed: int = 0) -> str:
    """Documents of about 110 characters: 12 of them make an epoch of some 35 sequences of 32 bytes."""
    rng = random.Random(seed)
    directory.mkdir(exist_ok=True)
    for i in range(documents):
        (directory / f"{i:02}.txt").write_text(" ".join(rng.choice(WORDS) for _ in range(18)) + "\n")
    return str(directory)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


Values = dict[str, dict[str, Any]]


def with_keys(values: Mapping[str, Mapping[str, Any]], changes: Mapping[str, Any]) -> Values:
    """Nested values with `{"section.key": value}` over them."""
    result = {section: dict(table) for section, table in values.items()}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        result.setdefault(section, {})[name] = value
    return result


@pytest.fixture(scope="session")
def tiny(text: str) -> Callable[..., Values]:
    """Values of a run that takes a blink, with `{"section.key": value}` over them."""

    def make(changes: Mapping[str, Any] | None = None) -> Values:
        base = {
            "model": {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 64, "vocab_size": 257},
            "data": {"source": text, "tokenizer": "bytes", "sequence_length": 32},
            "training": {"steps": 6, "batch_size": 2, "micro_batch_size": 1, "device": "cpu"},
            "schedule": {"warmup_steps": 2},
            "recipe": {"name": "fp8"},
            "validation": {"every": 4, "batches": 2},
            "checkpoint": {"every": 2},
            "log": {"sample_tokens": 4},
        }
        return with_keys(base, changes or {})

    return make


@pytest.fixture(scope="session")
def line(tiny: Callable[..., Values]) -> Callable[..., list[str]]:
    """The same run as the arguments of a command line, without --out."""

    def make(changes: Mapping[str, Any] | None = None) -> list[str]:
        pairs = [(f"--{s}.{k}", str(v)) for s, table in tiny(changes).items() for k, v in table.items()]
        return ["train", *(word for pair in pairs for word in pair)]

    return make


class Look:
    """What a run directory says, read without the code under test."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Every line of the metrics; none may be torn."""
        text = (self.path / "metrics.jsonl").read_text()
        assert text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of training steps."""
        return [line for line in self.lines if "loss" in line]

    def column(self, key: str) -> list[Any]:
        """One key of every training step."""
        return [line[key] for line in self.steps]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == kind]

    @property
    def status(self) -> dict[str, str]:
        return json.loads((self.path / "status.json").read_text())

    @property
    def trajectory(self) -> tuple[list[dict[str, str]], dict[str, str]]:
        """What has to be the same after any number of kills: the digits of every step's numbers as they stand
        in the file, each step once and in order, and the digests of the last checkpoint's files."""
        digits = []
        for line in (self.path / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line, parse_float=str, parse_int=str)
            if "event" not in record:
                keys = ("step", "loss", "grad_norm", "lr", "tokens", "val_loss")
                digits.append({key: record[key] for key in keys if key in record})
        checkpoints = self.path / "checkpoints"
        manifest = read_manifest(checkpoints / f"step-{steps(checkpoints)[-1]}")
        return digits, {name: entry.sha256 for name, entry in manifest.files.items()}

    def has_step(self, step: int, resumes: int = 0) -> Callable[[], bool]:
        """A question for `Process.send_when`: is the step done, after the run was resumed so many times?"""
        file, mark = self.path / "metrics.jsonl", f'{{"step": {step}, "loss"'

        def arrived() -> bool:
            text = file.read_text() if file.exists() else ""
            return mark in text and text.count('"event": "resume"') >= resumes

        return arrived


@pytest.fixture(scope="session")
def look() -> type[Look]:
    return Look


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
    ask: Callable[[Mapping[str, Any]], Any]

    def send(self, *signals: signal.Signals) -> None:
        """Deliver signals; several of them at one moment, while the process is held."""
        if len(signals) > 1:
            signals = (signal.SIGSTOP, *signals, signal.SIGCONT)
        for number in signals:
            os.kill(self.pid, number)

    def wait(self, seconds: float = 120) -> Ended:
        """How it ends; it must within so many seconds."""
        code = self.ask({"wait": self.pid, "seconds": seconds})
        if code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.ask({"wait": self.pid, "seconds": 10})
            raise AssertionError(f"still running after {seconds} s: {self.err.read_text()[-2000:]}")
        return Ended(code, self.out.read_text(), self.err.read_text())

    @property
    def is_running(self) -> bool:
        """Whether it has not ended; a process that nobody waited for yet is a zombie (Z)."""
        stat = Path(f"/proc/{self.pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

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

    def __init__(self, server: "subprocess.Popen[str]", directory: Path) -> None:
        self.server, self.directory, self.count = server, directory, 0

    def _ask(self, job: Mapping[str, Any]) -> Any:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(json.dumps(job), file=self.server.stdin, flush=True)
        return json.loads(self.server.stdout.readline())

    def start(
        self,
        *arguments: str | Path,
        terminal: str = "",
        reader_gone: bool = False,
        largest_file: int = 0,
        memory: int = 0,
        script: str | Path = "",
        folder: str | Path = "",
        forks: bool = True,
        **environment: str,
    ) -> Process:
        """Output goes to a file, the `terminal` of that name, or a pipe nobody reads; limits are in bytes.

        `forks`: programs in Python that it starts are forked, instead of started anew (`support.forked`).
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
            "forks": forks,
        }
        out.touch()
        return Process(self._ask(job), out, err, self._ask)

    def __call__(self, *arguments: str | Path, **more: Any) -> Ended:
        return self.start(*arguments, **more).wait()


@pytest.fixture(scope="session")
def narrowgauge(
    cache: Path, _expectations: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Narrowgauge]:
    script = Path(__file__).with_name("support") / "warm.py"
    # A user's output is buffered, whatever the tests' is.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as server:
        yield Narrowgauge(server, tmp_path_factory.mktemp("processes"))
        assert server.stdin is not None
        server.stdin.close()
