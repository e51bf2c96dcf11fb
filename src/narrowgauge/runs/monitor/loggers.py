"""Sends metrics and gauges to other programs: TensorBoard, W&B, trackio (`[log] sinks`).

The run directory is the record; a sink gets a live copy. A slow, hanging or unavailable sink does not stop
the training: each has its thread and a queue of at most 1000 records, a step only enqueues, and a record that
does not fit is dropped. A failing sink causes one warning and is retried every minute; the end of a run waits
for the sinks for a limited time (`CLOSE_S`).
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any

from narrowgauge.errors import UserError
from narrowgauge.runs.monitor.logger_backends import BACKENDS, LoggerBackend, RunInfo, is_installed

Values = dict[str, float]
Log = Callable[[str], None]

QUEUE_SIZE = 1000  # records
RETRY_S, CLOSE_S = 60.0, 15.0
_POLL_S = 0.2
_PARTS = {"amax": ("smallest", "median", "largest"), "scales": ("smallest", "largest")}
_LEFT_OUT = ("step", "elements", "val_tokens")


def require_sinks(names: Iterable[str]) -> None:
    """Check that the package of each sink is installed.

    Raises:
        UserError: a package is missing.
    """
    for name in names:
        if not is_installed(package := BACKENDS[name].package):
            raise UserError(
                f"log.sinks names {name}, and the package {package} is not installed; "
                f"python -m pip install {package}, or leave it out"
            )


class Feed:
    """One sink and its thread, which starts with the first record."""

    def __init__(self, name: str, open: Callable[[int], LoggerBackend], log: Log) -> None:
        self.name, self.open, self.log = name, open, log
        self._records: Queue[tuple[int, Values]] = Queue(QUEUE_SIZE)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_down = False
        self._next_try = 0.0
        self._sink: LoggerBackend | None = None

    def put(self, step: int, values: Values) -> None:
        """Enqueue a record; never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"sink {self.name}", daemon=True)
            self._thread.start()
        try:
            self._records.put_nowait((step, values))
        except Full:
            self._down("it does not keep up")

    def close(self, deadline: float) -> None:
        """Let the thread send the queued records until `deadline` (monotonic clock)."""
        if self._thread is None:
            return
        self._closing.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self.log(f"{self.name}: not finished in time, and abandoned; metrics.jsonl has every step")

    def _run(self) -> None:
        while True:
            try:
                step, values = self._records.get(timeout=_POLL_S)
            except Empty:
                if self._closing.is_set():
                    break
                continue
            self._send(step, values)
        if self._sink is not None:
            try:
                self._sink.close()
            except BaseException as error:
                self._down(f"{type(error).__name__}: {error}")

    def _send(self, step: int, values: Values) -> None:
        if time.monotonic() < self._next_try:
            return
        try:
            if self._sink is None:
                self._sink = self.open(step)
            self._sink.log(step, values)
        except BaseException as error:  # a library may even raise SystemExit, which would end this process
            self._next_try = time.monotonic() + RETRY_S
            self._down(f"{type(error).__name__}: {error}")
        else:
            self._is_down = False

    def _down(self, why: str) -> None:
        """Log a warning once, until the sink works again."""
        if not self._is_down:
            self._is_down = True
            reason = " ".join(why.split())[:300]
            self.log(
                f"NOT SENT to {self.name} ({reason}); training continues, and metrics.jsonl has every step"
            )


@dataclass(frozen=True)
class Loggers:
    """All sinks of a run; without sinks every call does nothing."""

    feeds: tuple[Feed, ...] = field(default=())

    @classmethod
    def of(cls, names: Iterable[str], path: Path, config: Mapping[str, Any], log: Log) -> "Loggers":
        """Make the sinks with these names (`BACKENDS`); each opens at its first record."""

        def opener(name: str) -> Callable[[int], LoggerBackend]:
            return lambda step: BACKENDS[name].open(RunInfo(path, config, step))

        return cls(tuple(Feed(name, opener(name), log) for name in dict.fromkeys(names)))

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
        """Let all sinks send their queues, within `CLOSE_S` seconds in total."""
        deadline = time.monotonic() + CLOSE_S
        for feed in self.feeds:
            feed.close(deadline)

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
