"""Jobs in real processes, one or a world of them, for checkpoints to survive."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.processes import Narrowgauge

SUPPORT = Path(__file__).parents[1] / "support"
Ask = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Ended:
    """How a job in a real process ended: exit code (negative: the signal), and its exception if any."""

    pid: int
    code: int | None
    said: str


@pytest.fixture(scope="session")
def _child(narrowgauge: Narrowgauge) -> Iterator[Ask]:
    with narrowgauge.serve(SUPPORT / "checkpoint_child.py") as ask:
        yield ask


@pytest.fixture
def in_process(_child: Ask, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    """Do a job of checkpoint_child.py in a separate process."""

    def run(do: str, path: Path, crash_at: str | None = None, **job: Any) -> Ended:
        said = tmp_path_factory.mktemp("said") / "said"
        environment = {} if crash_at is None else {"NARROWGAUGE_CRASH_AT": crash_at}
        job |= {"do": do, "path": str(path), "said": str(said), "environment": environment}
        answer = _child(job)
        return Ended(answer["pid"], answer["code"], said.read_text() if said.exists() else "")

    return run


@dataclass(frozen=True)
class World:
    """How a job ended on every rank: exit codes (negative: the signal), and what each returned or raised."""

    codes: list[int]
    said: list[Any]

    @property
    def one(self) -> Any:
        """What all ranks printed alike."""
        assert all(said == self.said[0] for said in self.said), self.said
        return self.said[0]


@pytest.fixture(scope="session")
def _ranks(narrowgauge: Narrowgauge) -> Iterator[Ask]:
    with narrowgauge.serve(SUPPORT / "checkpoint_ranks.py") as ask:
        yield ask


@pytest.fixture
def on_ranks(_ranks: Ask) -> Callable[..., World]:
    """Do a job of checkpoint_ranks.py in a world of n processes."""

    def run(ranks: int, do: str, path: Path, crash_at: str | None = None, **job: Any) -> World:
        environment = {} if crash_at is None else {"NARROWGAUGE_CRASH_AT": crash_at}
        job |= {"ranks": ranks, "do": do, "path": str(path), "environment": environment}
        return World(**_ranks(job))

    return run
