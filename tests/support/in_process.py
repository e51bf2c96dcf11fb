"""Runs in this process; `tests/conftest.py` has those in separate processes."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from narrowgauge.runs import run


@pytest.fixture
def train(tiny: Callable[..., dict[str, dict[str, Any]]], tmp_path: Path) -> Callable[..., Path]:
    """Train in this process: `train("name", {"section.key": value})` returns the run directory."""

    def do(
        name: str = "run", changes: Mapping[str, Any] | None = None, said: io.StringIO | None = None
    ) -> Path:
        return run(tiny(changes), tmp_path / name, Console(file=said or io.StringIO(), width=500))

    return do
