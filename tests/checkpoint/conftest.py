"""Jobs in real processes, one or a world of them, for checkpoints to survive."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.processes import RANKS, Ask, Narrowgauge


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
def _ask(narrowgauge: Narrowgauge) -> Iterator[Ask]:
    with narrowgauge.serve(RANKS, "support.checkpoint_ranks") as ask:
        yield ask


@pytest.fixture
def on_ranks(_ask: Ask) -> Callable[..., World]:
    """Do a job of checkpoint_ranks.py in n processes; one alone has no process group."""

    def run(ranks: int, do: str, path: Path, crash_at: str = "", **job: Any) -> World:
        environment = {"NARROWGAUGE_CRASH_AT": crash_at} if crash_at else {}
        how = {"environments": [environment] * ranks, "meets": ranks > 1}
        ends = _ask({"do": f"support.checkpoint_ranks.{do}", "with": job | {"path": str(path)}, **how})
        return World([e["code"] for e in ends], [e.get("result", e.get("error")) for e in ends])

    return run
