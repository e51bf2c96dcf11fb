"""Small groups of real processes: forked from one that has torch imported, or trainings of two ranks."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fault_runs import Runs
from support.processes import Narrowgauge


@pytest.fixture
def runs(narrowgauge, line, look, tmp_path):
    made = Runs(narrowgauge, line, look, tmp_path)
    yield made
    made.end_all()


@pytest.fixture
def out(tmp_path):
    """A run directory to be."""
    return tmp_path / "run"


@pytest.fixture(scope="session")
def ranks(narrowgauge: Narrowgauge) -> Iterator[Callable[..., list[Any]]]:
    """`ranks(world, "jobs_x.name", key=value)`: what the job returned on each rank; failures are shown."""
    with narrowgauge.serve(Path(__file__).with_name("ranks.py")) as ask:

        def run(world: int, job: str, **values: Any) -> list[Any]:
            file, _, name = job.partition(".")
            answers = ask({"world": world, "file": file, "name": name, "with": values})
            errors = [f"rank {i}: {a['error']}" for i, a in enumerate(answers) if "error" in a]
            assert not errors, "\n".join(errors)
            return [a["result"] for a in answers]

        yield run
