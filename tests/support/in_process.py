"""Runs in this process; `tests/conftest.py` has those in separate processes."""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from narrowgauge.trainer.runs import run
from narrowgauge.trainer.runs.monitor.machine import compute_by
from narrowgauge.trainer.training.step.trainer import Trainer


def run_here(values: Mapping[str, Any], path: Path, said: io.StringIO | None = None, **options: Any) -> Path:
    """Train in this process, and return the run directory."""
    try:
        return run(values, path, Console(file=said or io.StringIO(), width=500), **options)
    finally:
        compute_by({})  # the arithmetic of a run holds for its process


def bits(trainer: Trainer) -> dict[str, bytes]:
    """The bytes of each tensor of a trainer's state, by group and name."""
    return {
        f"{group} {name}": tensor.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes()
        for group, named in trainer.tensors().items()
        for name, tensor in named.items()
    }


@pytest.fixture
def train(tiny: Callable[..., dict[str, dict[str, Any]]], tmp_path: Path) -> Callable[..., Path]:
    """Train in this process: `train("name", {"section.key": value})` returns the run directory."""

    def do(
        name: str = "run",
        changes: Mapping[str, Any] | None = None,
        said: io.StringIO | None = None,
        **options,
    ) -> Path:
        return run_here(tiny(changes), tmp_path / name, said, **options)

    return do


@pytest.fixture(scope="session")
def trained(tiny: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs that are only read, each trained once: `trained({"section.key": value})`."""
    paths: dict[str, Path] = {}

    def path_of(changes: Mapping[str, Any] | None = None) -> Path:
        key = json.dumps(changes, sort_keys=True)
        if key not in paths:
            paths[key] = run_here(tiny(changes), tmp_path_factory.mktemp("trained") / "run")
        return paths[key]

    return path_of


@pytest.fixture
def with_trainer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`with_trainer(f)`: `f(trainer)` is called with the trainer of each run that begins from now on."""
    begin = Trainer.begin.__func__

    def do(prepare: Callable[[Trainer], object]) -> None:
        def begin_and_prepare(cls, *arguments, **named):
            trainer = begin(cls, *arguments, **named)
            prepare(trainer)
            return trainer

        monkeypatch.setattr(Trainer, "begin", classmethod(begin_and_prepare))

    return do
