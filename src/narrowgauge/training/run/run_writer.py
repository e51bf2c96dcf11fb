"""The run directory while training goes on: its record must not be what ends a run.

A checkpoint that cannot be written is lost work, and is told as such. A line of the metrics that cannot be
written is waiting work: it is kept in memory, with one warning, and written with the next line that can be. A
reader of the file sees whole lines in their order, and a gap that closes again.

A directory that is gone is another matter. A network disk that went away leaves the empty directory it was
mounted on, and whoever then writes under the old name fills another disk. So the directory is known by device
and inode, and a save into another one is refused.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from errno import ENOENT
from pathlib import Path
from typing import Any

from narrowgauge.json_lines import append_lines
from narrowgauge.training.config.config import Config
from narrowgauge.training.config.diff import ConfigDiff
from narrowgauge.training.monitor.loggers import Loggers
from narrowgauge.training.run_directory import RunDirectory

_MOST = 100_000  # lines of a file that are kept in memory; beyond that the oldest go


@dataclass(frozen=True)
class RunWriter(RunDirectory):
    """A run directory whose record waits where the disk does not take it.

    Attributes:
        say: gets the one warning.
        waiting: lines not yet written, by file.
        identity: device and inode of the directory when this was made.
        sinks: get a copy of metrics and gauges, now or never.
    """

    say: Callable[[str], None]
    waiting: dict[Path, list[Mapping[str, Any]]] = field(default_factory=dict)
    identity: list[int] = field(default_factory=list)
    sinks: Loggers = field(default_factory=Loggers)

    def __post_init__(self) -> None:
        self.identity.extend(_identity(self.path))

    def record(self, line: Mapping[str, Any]) -> None:
        """Append one line to the metrics, now or when it can be."""
        self._append(self.metrics, [line])
        self.sinks.metrics(line)

    def record_gauges(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append what the gauges read in a step, now or when it can be."""
        lines = list(lines)
        self._append(self.gauges, lines)
        self.sinks.gauges(lines)

    def sync_metrics(self) -> None:
        """Put the record on the disk, as far as it can be written."""
        self.flush()
        try:
            super().sync_metrics()
        except OSError as error:
            self._warn(self.metrics, error)

    def keep_metrics_until(self, step: int, rollbacks: int | None = None) -> None:
        """Drop the lines of steps after `step`, also of those that wait. Raises `OSError`."""
        self.flush()
        super().keep_metrics_until(step, rollbacks)

    def flush(self) -> None:
        """Try to write what waits."""
        for file in list(self.waiting):
            self._append(file, [])

    def require_there(self) -> None:
        """Refuse to go on in another directory than the one the run began in. Raises `FileNotFoundError`."""
        if _identity(self.path) != self.identity:
            raise FileNotFoundError(
                ENOENT, "the run directory is gone, and another one is in its place", str(self.path)
            )

    def _append(self, file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        every = [*self.waiting.get(file, []), *lines]
        try:
            self.require_there()
            append_lines(file, every)
        except OSError as error:
            self._warn(file, error)
            self.waiting[file] = every[-_MOST:]
        else:
            self.waiting.pop(file, None)

    def _warn(self, file: Path, error: OSError) -> None:
        """Once for each stretch of time in which it fails."""
        if not self.waiting:
            reason = error.strerror or str(error)
            self.say(f"NOT RECORDED: {file} cannot be written ({reason}); training goes on, and lines wait")


class NullRunWriter(RunWriter):
    """What a process other than the first has of the run directory: it reads there, and writes nothing."""

    def record(self, line: Mapping[str, Any]) -> None:
        """The first process does."""

    def record_gauges(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """The first process does."""

    def sync_metrics(self) -> None:
        """The first process does."""

    def keep_metrics_until(self, step: int, rollbacks: int | None = None) -> None:
        """The first process does."""

    def set_status(self, status: str, reason: str) -> None:
        """The first process does."""

    def adopt(self, config: Config, changes: ConfigDiff, digest: str, step: int) -> None:
        """The first process does."""


def _identity(path: Path) -> list[int]:
    """Raises `OSError`."""
    found = os.stat(path)
    return [found.st_dev, found.st_ino]
