"""What an integration needs: its package, and processes in which it runs in its own trainer."""

from importlib import import_module
from typing import Any

import pytest

from support.processes import RANKS, launched


@pytest.fixture(scope="session")
def hf():
    """`hugging_face`, imported only where a test runs: transformers takes seconds."""
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    return import_module("integrations.hugging_face")


@pytest.fixture(scope="session")
def pl():
    """`lightning_runs`, in the same way."""
    pytest.importorskip("lightning", reason="lightning is not installed")
    return import_module("integrations.lightning_runs")


@pytest.fixture
def ranks(narrowgauge, tmp_path):
    """`ranks(2, "jobs_x.name", key=value)`: what the job returned on each rank; failures are shown."""

    def run(world: int, job: str, **arguments: Any) -> list[Any]:
        how = {"environments": launched(world), "meets": False}
        how |= {"folder": str(tmp_path), "warnings": "ignore"}  # of others' packages
        with narrowgauge.serve(RANKS) as ask:
            answers = ask({"do": f"integrations.{job}", "with": arguments, **how})
        errors = [f"rank {i}: {a['trace']}" for i, a in enumerate(answers) if "trace" in a]
        assert not errors, "\n".join(errors)
        return [a["result"] for a in answers]

    return run
