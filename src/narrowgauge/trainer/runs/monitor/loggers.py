"""Sends metrics and gauges to other programs: TensorBoard, W&B, trackio (`[log] sinks`).

The run directory is the record; a sink is a copy. These programs queue, retry and send by themselves. One
that raises an error does not stop the training: one line says so, and the rest of the run goes without it.

A sink is opened for a run directory at its first step, as two functions: one takes the values of a step, the
other ends it. It keeps its files inside the run directory if the program allows it, and a resumed run
continues the same files.
"""

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from narrowgauge.system.errors import UserError

Values = dict[str, float]
Log = Callable[[str], None]
#: Logs the values of a step by name, and sends what remains; each may raise any exception.
Sink = tuple[Callable[[int, Values], object], Callable[[], object]]

PROJECT = "narrowgauge"
_PARTS = {"amax": ("smallest", "median", "largest"), "scales": ("smallest", "largest")}
_LEFT_OUT = ("step", "elements", "val_tokens")


def _tensorboard(path: Path, config: Mapping[str, Any], first: int) -> Sink:
    """Event files in RUN/tensorboard; `tensorboard --logdir RUN` shows them."""
    writer = import_module("torch.utils.tensorboard").SummaryWriter(
        log_dir=str(path / "tensorboard"),
        purge_step=first,  # a step repeated after a kill is shown once
        flush_secs=10,
    )

    def log(step: int, values: Values) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(path: Path, config: Mapping[str, Any], first: int) -> Sink:
    """A W&B run in RUN/wandb; W&B's variables apply, and `wandb sync` sends what remains there."""
    wandb = import_module("wandb")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        name=path.resolve().name,
        id=_identity(path / "wandb" / "narrowgauge-id"),
        dir=str(path),
        config=dict(config),
        resume="allow",
        settings=wandb.Settings(console="off", silent=True, init_timeout=10.0),
    )
    run.define_metric("*", step_metric="step")  # W&B's own step never decreases; that of a resumed run does
    return lambda step, values: run.log({**values, "step": step}), run.finish


def _trackio(path: Path, config: Mapping[str, Any], first: int) -> Sink:
    """A trackio run in trackio's folder (TRACKIO_DIR); `trackio show` shows it."""
    run = import_module("trackio").init(
        project=PROJECT,
        name=f"{path.resolve().name}-{_identity(path / 'trackio' / 'narrowgauge-id')}",
        config={f"{s}.{k}": v for s, table in config.items() for k, v in table.items()},
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return lambda step, values: run.log(values, step=step), run.finish


#: Opens each sink for a run directory, its resolved configuration and the first step to be logged; by the
#: name of its package, which is also that of the extra.
SINKS: Mapping[str, Callable[[Path, Mapping[str, Any], int], Sink]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}


def require_sinks(names: Iterable[str]) -> None:
    """Check that the package of each sink is installed."""
    for name in names:
        if not is_installed(name):
            raise UserError(
                f"log.sinks names {name}, and the package {name} is not installed; "
                f"python -m pip install {name}, or leave it out"
            )


class Loggers:
    """All sinks of a run; without sinks every call does nothing."""

    def __init__(self, openers: Mapping[str, Callable[[int], Sink]] | None = None, log: Log = print) -> None:
        """Take functions that open sinks at a step, by name, and one that prints a warning."""
        self._openers, self._sinks, self._log = dict(openers or {}), dict[str, Sink](), log

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Send the values of a line of metrics.jsonl; events are not sent."""
        if self._openers and "event" not in line:
            self._put(line["step"], numbers(line))

    def gauges(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Send the lines of one step of gauges.jsonl, named `gauges/PLACE/LAYER/FIGURE`."""
        values: Values = {}
        for line in lines if self._openers else ():
            prefix = f"gauges/{line['place']}/{line['layer']}"
            values |= {f"{prefix}/{name}": value for name, value in numbers(line).items()}
        if values:
            self._put(line["step"], values)

    def close(self) -> None:
        """Let each program send what is left."""
        for name in [name for name in self._sinks if name in self._openers]:
            with self._harmless(name):
                self._sinks[name][1]()

    def _put(self, step: int, values: Values) -> None:
        for name, open_at in list(self._openers.items()):
            with self._harmless(name):
                if name not in self._sinks:
                    self._sinks[name] = open_at(step)
                self._sinks[name][0](step, values)

    @contextmanager
    def _harmless(self, name: str) -> Iterator[None]:
        """Go on without a sink that fails in this block."""
        try:
            yield
        except (Exception, SystemExit) as error:  # a library may try to end this process
            del self._openers[name]
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self._log(
                f"NOT SENT to {name} from now on ({reason}); training continues, and metrics.jsonl has every "
                "step"
            )


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
