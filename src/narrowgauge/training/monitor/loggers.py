"""Metrics and gauges on their way to other programs: TensorBoard, W&B, trackio (`[log] sinks`).

The run directory is the record; a sink is a copy for somebody who watches. So a sink may be slow, hang or be
down, and training goes on: each has a thread of its own and a line of at most 1000 records waiting for it, a
step only puts a record there, and one that finds no room is left out. When a sink fails there is one warning,
and it is tried again every minute; the end of a run waits some seconds for it, and no longer.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any

from narrowgauge.errors import UserError
from narrowgauge.training.monitor.logger_backends import KINDS, LoggerBackend, Opening, is_installed

Values = dict[str, float]
Say = Callable[[str], None]

WAITING = 1000  # records
RETRY_S, CLOSE_S = 60.0, 15.0
_POLL_S = 0.2
_PARTS = {"amax": ("smallest", "median", "largest"), "scales": ("smallest", "largest")}
_LEFT_OUT = ("step", "elements")


def require_sinks(names: Iterable[str]) -> None:
    """Refuse a sink whose program is not installed. Raises `UserError`."""
    for name in names:
        if not is_installed(package := KINDS[name].package):
            raise UserError(
                f"log.sinks names {name}, and the package {package} is not installed; "
                f"pip install 'narrowgauge[{name}]', or leave it out"
            )


class Feed:
    """One sink and its thread, which begins with the first record."""

    def __init__(self, name: str, open: Callable[[int], LoggerBackend], say: Say) -> None:
        self.name, self.open, self.say = name, open, say
        self._records: Queue[tuple[int, Values]] = Queue(WAITING)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_down = False
        self._next_try = 0.0
        self._sink: LoggerBackend | None = None

    def put(self, step: int, values: Values) -> None:
        """Give a record to the thread; never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"sink {self.name}", daemon=True)
            self._thread.start()
        try:
            self._records.put_nowait((step, values))
        except Full:
            self._down("it does not keep up")

    def close(self, deadline: float) -> None:
        """Let the thread send what waits, until `deadline` of the monotonic clock."""
        if self._thread is None:
            return
        self._closing.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self.say(f"{self.name}: not done in time, and left behind; metrics.jsonl has every step")

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
        except BaseException as error:  # a program may even raise SystemExit, and means our process
            self._next_try = time.monotonic() + RETRY_S
            self._down(f"{type(error).__name__}: {error}")
        else:
            self._is_down = False

    def _down(self, why: str) -> None:
        """Say so, once for each stretch of time in which it fails."""
        if not self._is_down:
            self._is_down = True
            reason = " ".join(why.split())[:300]
            self.say(
                f"NOT SENT to {self.name} ({reason}); training goes on, and metrics.jsonl has every step"
            )


@dataclass(frozen=True)
class Loggers:
    """All sinks of a run; without any, every call is for nothing."""

    feeds: tuple[Feed, ...] = field(default=())

    @classmethod
    def of(cls, names: Iterable[str], path: Path, config: Mapping[str, Any], say: Say) -> "Loggers":
        """Of these `KINDS`, opened when the first record comes."""

        def opener(name: str) -> Callable[[int], LoggerBackend]:
            return lambda step: KINDS[name].open(Opening(path, config, step))

        return cls(tuple(Feed(name, opener(name), say) for name in dict.fromkeys(names)))

    def metrics(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl; events stay there."""
        if self.feeds and "event" not in line:
            self._put(line["step"], numbers(line))

    def gauges(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """The lines of one step of gauges.jsonl, as `gauges/PLACE/LAYER/FIGURE`."""
        if not self.feeds:
            return
        values: Values = {}
        step = 0
        for line in lines:
            step = line["step"]
            where = f"gauges/{line['place']}/{line['layer']}"
            values |= {f"{where}/{name}": value for name, value in numbers(line).items()}
        if values:
            self._put(step, values)

    def close(self) -> None:
        """Let all of them send what waits, for `CLOSE_S` seconds together."""
        deadline = time.monotonic() + CLOSE_S
        for feed in self.feeds:
            feed.close(deadline)

    def _put(self, step: int, values: Values) -> None:
        for feed in self.feeds:
            feed.put(step, values)


def numbers(line: Mapping[str, Any]) -> Values:
    """What is a number in a line, by name; of lists the parts that have names.

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
