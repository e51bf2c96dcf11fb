"""Logger backends: one class for each program, imported only when used.

A sink is opened for a run directory at its first step, and receives the values of one step at a time. Each
keeps its files inside the run directory if the program allows it, and a resumed run continues the same files.
"""

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

PROJECT = "narrowgauge"
# Shorter than the wait at the end of a run (`loggers.CLOSE_S`): abandoning W&B while it opens delays the exit
# of the process by over a minute.
_OPEN_S = 10.0


class LoggerBackend(Protocol):
    """Interface to a program; every method may take long or raise any exception."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step by name."""

    def close(self) -> None:
        """Send the remaining records."""


@dataclass(frozen=True)
class RunInfo:
    """The facts of a run that a sink needs when it opens."""

    path: Path  # the run directory
    config: Mapping[str, Any]  # resolved, nested
    step: int  # the first step to be logged


class TensorBoard:
    """Event files in RUN/tensorboard; `tensorboard --logdir RUN` shows them."""

    def __init__(self, run: RunInfo) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        # a step repeated after a kill is shown once
        self.writer = writer(log_dir=str(run.path / "tensorboard"), purge_step=run.step, flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log one scalar for each name."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self.writer.close()


class WeightsAndBiases:
    """A W&B run, with files in RUN/wandb; W&B's variables (WANDB_MODE, WANDB_PROJECT, ...) apply."""

    def __init__(self, run: RunInfo) -> None:
        wandb = import_module("wandb")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run.path.resolve().name,
            id=_identity(run.path / "wandb" / "narrowgauge-id"),
            dir=str(run.path),
            config=dict(run.config),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, init_timeout=_OPEN_S),
        )
        # W&B's step counter never decreases, but that of a resumed run does
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log all values in one call."""
        self.run.log({**values, "step": step})

    def close(self) -> None:
        """Finish; unsent records stay in RUN/wandb for `wandb sync`."""
        self.run.finish()


class Trackio:
    """A trackio run in trackio's folder (TRACKIO_DIR); `trackio show` shows it."""

    def __init__(self, run: RunInfo) -> None:
        trackio = import_module("trackio")
        name = f"{run.path.resolve().name}-{_identity(run.path / 'trackio' / 'narrowgauge-id')}"
        self.run = trackio.init(
            project=PROJECT,
            name=name,
            config={f"{s}.{k}": v for s, table in run.config.items() for k, v in table.items()},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log all values in one call."""
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


@dataclass(frozen=True)
class BackendSpec:
    """A backend: the package it needs, which is also the name of the extra, and its constructor."""

    package: str
    open: Callable[[RunInfo], LoggerBackend]


BACKENDS: Mapping[str, BackendSpec] = {
    "tensorboard": BackendSpec("tensorboard", TensorBoard),
    "wandb": BackendSpec("wandb", WeightsAndBiases),
    "trackio": BackendSpec("trackio", Trackio),
}


def is_installed(package: str) -> bool:
    """Whether a package can be imported; a plain folder of that name, such as RUN/wandb, is not enough."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _identity(file: Path) -> str:
    """The id of this run in a program, kept in a file so that a resumed run continues it."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4), encoding="ascii")
    return file.read_text(encoding="ascii").strip()
