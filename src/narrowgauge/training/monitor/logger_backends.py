"""Where else metrics and gauges can go: one class for each program, which is imported only when used.

A sink is opened for a run directory at the first step it will see, and takes the numbers of one step at a
time. Each keeps its own files inside the run directory, where the program lets us choose, and a run that is
continued goes on in the same place there.
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
# Less than a run waits at its end (`sinks.CLOSE_S`): W&B, left behind while it opens, holds up the exit of
# the process for over a minute.
_OPEN_S = 10.0


class LoggerBackend(Protocol):
    """What a program is to us; every method may take long, or fail in ways of its own."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step, by name."""

    def close(self) -> None:
        """Send what is left."""


@dataclass(frozen=True)
class Opening:
    """What there is to know of a run when a sink is opened."""

    path: Path  # the run directory
    config: Mapping[str, Any]  # resolved, nested
    step: int  # the first that will be logged


class TensorBoard:
    """Event files in RUN/tensorboard; `tensorboard --logdir RUN` shows them."""

    def __init__(self, run: Opening) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        # steps that were done before and are done again after a kill are shown once
        self.writer = writer(log_dir=str(run.path / "tensorboard"), purge_step=run.step, flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar each."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self.writer.close()


class WeightsAndBiases:
    """A run of W&B, files in RUN/wandb; its own variables (WANDB_MODE, WANDB_PROJECT, ...) hold."""

    def __init__(self, run: Opening) -> None:
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
        # its own counter never goes back, and a run that is continued does
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All of them at once."""
        self.run.log({**values, "step": step})

    def close(self) -> None:
        """Finish, as far as it was sent; the rest lies in RUN/wandb, for `wandb sync`."""
        self.run.finish()


class Trackio:
    """A run of trackio in its own folder (TRACKIO_DIR); `trackio show` shows it."""

    def __init__(self, run: Opening) -> None:
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
        """All of them at once."""
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish."""
        self.run.finish()


@dataclass(frozen=True)
class Kind:
    """A program: the package it needs, which is also our extra's name, and how it is opened."""

    package: str
    open: Callable[[Opening], LoggerBackend]


KINDS: Mapping[str, Kind] = {
    "tensorboard": Kind("tensorboard", TensorBoard),
    "wandb": Kind("wandb", WeightsAndBiases),
    "trackio": Kind("trackio", Trackio),
}


def is_installed(package: str) -> bool:
    """Whether a package can be imported; a folder of its name, such as W&B's own `wandb/`, is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _identity(file: Path) -> str:
    """What a program knows this run by, the same when the run is continued; kept in a file."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4), encoding="ascii")
    return file.read_text(encoding="ascii").strip()
