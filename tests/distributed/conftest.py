"""Small groups of real processes: forked from one that has torch imported, or trainings of two ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.fault_runs import _runs, out, runs
from support.processes import RANKS, Narrowgauge

__all__ = ["_runs", "out", "runs"]


@pytest.fixture(scope="session")
def ranks(narrowgauge: Narrowgauge) -> Iterator[Callable[..., list[Any]]]:
    """`ranks(world, "jobs_x.name", key=value)`: what the job returned on each rank; failures are shown."""
    files = "jobs_training", "test_ddp", "test_fsdp", "test_quantized_gather", "test_quantized_reduce"
    with narrowgauge.serve(RANKS, *(f"distributed.{file}" for file in files)) as ask:

        def run(world: int, job: str, **values: Any) -> list[Any]:
            how = {"environments": [{}] * world, "meets": True}
            answers = ask({"do": f"distributed.{job}", "with": values, **how})
            errors = [f"rank {i}: {a['trace']}" for i, a in enumerate(answers) if "trace" in a]
            assert not errors, "\n".join(errors)
            return [a["result"] for a in answers]

        yield run
