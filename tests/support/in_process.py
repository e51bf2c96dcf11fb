"""Runs in this process; `tests/conftest.py` has those in separate processes."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from narrowgauge.runs import run
from narrowgauge.runs.monitor.arithmetic import NO_CHOICE


@pytest.fixture
def train(tiny: Callable[..., dict[str, dict[str, Any]]], tmp_path: Path) -> Callable[..., Path]:
    """Train in this process: `train("name", {"section.key": value})` returns the run directory."""

    def do(
        name: str = "run", changes: Mapping[str, Any] | None = None, said: io.StringIO | None = None
    ) -> Path:
        try:
            return run(tiny(changes), tmp_path / name, Console(file=said or io.StringIO(), width=500))
        finally:
            NO_CHOICE.choose()  # the arithmetic of a run holds for its process

    return do
