"""Sends metrics and gauges to other programs: TensorBoard, W&B, trackio (`[log] sinks`).

The run directory is the record; a sink is a copy. These programs queue and send by themselves. One that
fails does not stop the training: it is warned of once, until it works again, and tried again after a minute.

A backend is opened for a run directory at its first step and receives the values of one step at a time. It
keeps its files inside the run directory if the program allows it, and a resumed run continues the same files.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from narrowgauge.errors import UserError

Values = dict[str, float]
Log = Callable[[str], None]

PROJECT = "narrowgauge"
RETRY_S = 60.0
_PARTS = {"amax": ("smallest", "median", "largest"), "scales": ("smallest", "largest")}
_LEFT_OUT = ("step", "elements", "val_tokens")


class LoggerBackend(Protocol):
    """Interface to a program; every method may raise any exception."""

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
            settings=wandb.Settings(console="off", silent=True, init_timeout=10.0),
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


#: The constructor of each backend, by the name of its package, which is also that of the extra.
BACKENDS: Mapping[str, Callable[[RunInfo], LoggerBackend]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def require_sinks(names: Iterable[str]) -> None:
    """Check that the package of each sink is installed.

    Raises:
        UserError: a package is missing.
    """
    for name in names:
        if not is_installed(name):
            raise UserError(
                f"log.sinks names {name}, and the package {name} is not installed; "
                f"python -m pip install {name}, or leave it out"
            )


class Feed:
    """One sink, which opens at its first record."""

    def __init__(self, name: str, open: Callable[[int], LoggerBackend], log: Log) -> None:
        self.name, self.open, self.log = name, open, log
        self._is_down, self._next_try = False, 0.0
        self._sink: LoggerBackend | None = None

    def put(self, step: int, values: Values) -> None:
        """Send a record, unless the sink failed less than a minute ago."""
        if time.monotonic() < self._next_try:
            return
        try:
            if self._sink is None:
                self._sink = self.open(step)
            self._sink.log(step, values)
        except (Exception, SystemExit) as error:  # a library may try to end this process
            self._next_try = time.monotonic() + RETRY_S
            self._down(error)
        else:
            self._is_down = False

    def close(self) -> None:
        """Let the program send what is left."""
        if self._sink is not None:
            try:
                self._sink.close()
            except (Exception, SystemExit) as error:
                self._down(error)

    def _down(self, error: BaseException) -> None:
        """Log a warning once, until the sink works again."""
        if not self._is_down:
            self._is_down = True
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.log(
                f"NOT SENT to {self.name} ({reason}); training continues, and metrics.jsonl has every step"
            )


@dataclass(frozen=True)
class Loggers:
    """All sinks of a run; without sinks every call does nothing."""

    feeds: tuple[Feed, ...] = field(default=())

    @classmethod
    def of(cls, names: Iterable[str], path: Path, config: Mapping[str, Any], log: Log) -> "Loggers":
        """Make the sinks with these names (`BACKENDS`)."""

        def feed(name: str) -> Feed:
            return Feed(name, lambda step: BACKENDS[name](RunInfo(path, config, step)), log)

        return cls(tuple(map(feed, dict.fromkeys(names))))

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Send the values of a line of metrics.jsonl; events are not sent."""
        if self.feeds and "event" not in line:
            self._put(line["step"], numbers(line))

    def gauges(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Send the lines of one step of gauges.jsonl, named `gauges/PLACE/LAYER/FIGURE`."""
        if not self.feeds:
            return
        values: Values = {}
        step = 0
        for line in lines:
            step = line["step"]
            prefix = f"gauges/{line['place']}/{line['layer']}"
            values |= {f"{prefix}/{name}": value for name, value in numbers(line).items()}
        if values:
            self._put(step, values)

    def close(self) -> None:
        """Close all sinks."""
        for feed in self.feeds:
            feed.close()

    def _put(self, step: int, values: Values) -> None:
        for feed in self.feeds:
            feed.put(step, values)


def numbers(line: Mapping[str, Any]) -> Values:
    """The numeric fields of a line by name; list fields with named elements are expanded.

    >>> numbers({"step": 3, "cast": "e4m3", "zeros": 0.5, "sqnr_db": None, "scales": [1.0, 2.0]})
    {'zeros': 0.5, 'scales_smallest': 1.0, 'scales_largest': 2.0}
    """
    values: Values = {}
    for key, value in line.items():
        if isinstance(value, (int, float)) and key not in _LEFT_OUT:
            values[key] = float(value)
        elif key in _PARTS and value:
            values |= {f"{key}_{part}": float(v) for part, v in zip(_PARTS[key], value, strict=True)}
    return values


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
