import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Ended:
    """How a job in a real process ended: exit code (negative: the signal), and its exception if any."""

    pid: int
    code: int | None
    said: str


@pytest.fixture(scope="session")
def _server() -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).with_name("child.py")
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        yield server
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture
def in_process(
    _server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Ended]:
    """Do a job of child.py in a process of its own."""

    def run(do: str, path: Path, crash_at: str | None = None, **job: Any) -> Ended:
        said = tmp_path_factory.mktemp("said") / "said"
        environment = {} if crash_at is None else {"NARROWGAUGE_CRASH_AT": crash_at}
        job |= {"do": do, "path": str(path), "said": str(said), "environment": environment}
        assert _server.stdin is not None
        assert _server.stdout is not None
        print(json.dumps(job), file=_server.stdin, flush=True)
        answer = json.loads(_server.stdout.readline())
        return Ended(answer["pid"], answer["code"], said.read_text() if said.exists() else "")

    return run


@dataclass(frozen=True)
class World:
    """How a job ended on every rank: exit codes (negative: the signal), and what each returned or raised."""

    codes: list[int]
    said: list[Any]

    @property
    def one(self) -> Any:
        """What all ranks said alike."""
        assert all(said == self.said[0] for said in self.said), self.said
        return self.said[0]


@pytest.fixture(scope="session")
def _worlds() -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).with_name("ranks.py")
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        yield server
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture
def on_ranks(_worlds: subprocess.Popen[str]) -> Callable[..., World]:
    """Do a job of ranks.py in a world of so many processes."""

    def run(ranks: int, do: str, path: Path, crash_at: str | None = None, **job: Any) -> World:
        environment = {} if crash_at is None else {"NARROWGAUGE_CRASH_AT": crash_at}
        job |= {"ranks": ranks, "do": do, "path": str(path), "environment": environment}
        assert _worlds.stdin is not None
        assert _worlds.stdout is not None
        print(json.dumps(job), file=_worlds.stdin, flush=True)
        return World(**json.loads(_worlds.stdout.readline()))

    return run
