"""The run directory during training: a failed write of the metrics must not end the run.

A checkpoint that cannot be written is lost work and is reported as an error. A metrics line that cannot be
written is kept in memory, with one warning, and written together with the next line. A reader of the file
sees complete lines in order; a gap is filled later.

A directory that disappears is another matter. An unmounted network disk leaves its empty mount point, and
writes under the old path would fill another disk. So the directory is identified by device and inode, and a
save into a different one is refused.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from errno import ENOENT
from pathlib import Path
from typing import Any

from narrowgauge.system.json_lines import append_lines
from narrowgauge.trainer.runs.monitor.loggers import Loggers
from narrowgauge.trainer.runs.run_directory import RunDirectory

_MOST = 100_000  # lines of a file kept in memory; beyond that the oldest are dropped


@dataclass(frozen=True)
class RunWriter(RunDirectory):
    """A run directory that keeps lines in memory while the disk rejects them."""

    log: Callable[[str], None]  # prints the warning
    waiting: dict[Path, list[Mapping[str, Any]]] = field(default_factory=dict)  # lines not yet written
    identity: list[int] = field(default_factory=list)  # device and inode at the start
    sinks: Loggers = field(default_factory=Loggers)  # receive a copy of metrics and gauges once

    def __post_init__(self) -> None:
        self.identity.extend(_identity(self.path))

    def record(self, line: Mapping[str, Any]) -> None:
        """Append one line to the metrics, at once or when the disk accepts it."""
        self._append(self.metrics, [line])
        self.sinks.metrics(line)

    def record_gauges(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append the gauge readings of a step, at once or when the disk accepts them."""
        lines = list(lines)
        self._append(self.gauges, lines)
        self.sinks.gauges(lines)

    def sync_metrics(self) -> None:
        """Flush metrics and gauges to the disk; an error only causes a warning."""
        self.flush()
        try:
            super().sync_metrics()
        except OSError as error:
            self._warn(self.metrics, error)

    def keep_metrics_until(self, step: int, rollbacks: int | None = None) -> None:
        """Drop the lines of steps after `step`, including those not yet written.

        Raises:
            OSError: the files cannot be written.
        """
        self.flush()
        super().keep_metrics_until(step, rollbacks)

    def flush(self) -> None:
        """Try to write the waiting lines."""
        for file in list(self.waiting):
            self._append(file, [])

    def require_there(self) -> None:
        """Check that the path is still the directory in which the run began.

        Raises:
            FileNotFoundError: it is gone, or another directory is in its place.
        """
        if _identity(self.path) != self.identity:
            raise FileNotFoundError(
                ENOENT, "the run directory is gone, and another one is in its place", str(self.path)
            )

    def _append(self, file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        all_lines = [*self.waiting.get(file, []), *lines]
        try:
            self.require_there()
            append_lines(file, all_lines)
        except OSError as error:
            self._warn(file, error)
            self.waiting[file] = all_lines[-_MOST:]
        else:
            self.waiting.pop(file, None)

    def _warn(self, file: Path, error: OSError) -> None:
        """Log a warning once, until writing succeeds again."""
        if not self.waiting:
            reason = error.strerror or str(error)
            self.log(f"NOT RECORDED: {file} cannot be written ({reason}); training continues, and lines wait")


def _nothing(*_: Any, **__: Any) -> Any:
    """Do nothing: rank 0 does it."""


class NullRunWriter(RunWriter):
    """The run directory on ranks other than 0, which read but do not write."""

    record = record_gauges = sync_metrics = keep_metrics_until = _nothing
    record_rules = set_status = adopt = _nothing


def _identity(path: Path) -> list[int]:
    """Device and inode of a path that exists."""
    stat = os.stat(path)
    return [stat.st_dev, stat.st_ino]
