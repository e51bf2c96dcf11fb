"""Processes under torchrun, in which an integration runs in its own trainer."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from support.processes import TORCHRUN

SOURCE = Path(__file__).parents[2] / "src"


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
def torchrun(tmp_path):
    """`torchrun(2, "jobs_x.name", key=value)`: what the job returned on each rank; its words on failure."""

    def run(world: int, job: str, **arguments: Any) -> list[Any]:
        words = [TORCHRUN, "--standalone", "--nproc-per-node", world, Path(__file__).with_name("rank.py")]
        words += [tmp_path, job, json.dumps(arguments)]
        how = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}}
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, **how, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]

    return run
