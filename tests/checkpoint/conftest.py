"""Jobs in real processes, one or a world of them, for checkpoints to survive."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.processes import Narrowgauge

RANKS = Path(__file__).parents[1] / "support" / "checkpoint_ranks.py"


@dataclass(frozen=True)
class World:
    """How a job ended on every rank: exit codes (negative: the signal), and what each returned or raised."""

    pids: list[int]
    codes: list[int]
    said: list[Any]

    @property
    def one(self) -> Any:
        """What all ranks said alike."""
        assert all(said == self.said[0] for said in self.said), self.said
        return self.said[0]


@pytest.fixture(scope="session")
def _ranks(narrowgauge: Narrowgauge) -> Iterator[Callable[[Mapping[str, Any]], Any]]:
    with narrowgauge.serve(RANKS) as ask:
        yield ask


@pytest.fixture
def on_ranks(_ranks: Callable[[Mapping[str, Any]], Any]) -> Callable[..., World]:
    """Do a job of checkpoint_ranks.py in n processes."""

    def run(ranks: int, do: str, path: Path, crash_at: str = "", **job: Any) -> World:
        environment = {"NARROWGAUGE_CRASH_AT": crash_at} if crash_at else {}
        job |= {"ranks": ranks, "do": do, "path": str(path), "environment": environment}
        return World(**_ranks(job))

    return run
