"""Runs in this process; `tests/conftest.py` has those in processes of their own."""

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from narrowgauge.training import run


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """More threads only wait for each other at this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def train(tiny: Callable[..., dict[str, dict[str, Any]]], tmp_path: Path) -> Callable[..., Path]:
    """Train in this process: `train("name", {"section.key": value})` returns the run directory."""

    def do(
        name: str = "run", changes: Mapping[str, Any] | None = None, said: io.StringIO | None = None
    ) -> Path:
        return run(tiny(changes), tmp_path / name, Console(file=said or io.StringIO(), width=500))

    return do
