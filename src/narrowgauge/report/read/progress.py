"""The progress of runs: state, last step, losses, time left. No content of a directory makes it fail.

Only the ends of the files are read, so a folder of long runs is listed quickly. The status of a killed run is
still "running", so its lock decides: if no process holds it, the run was killed. A process that holds it and
has recorded nothing for much longer than its steps take is silent.
"""

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge.errors import UserError
from narrowgauge.report.read.records import as_float, parse_line, read_config
from narrowgauge.report.read.run import CONFIG, METRICS, STATUS, read_state

DEEPEST = 3  # runs/compare-debug/fp8 is two below runs
ENDED = ("done", "diverged", "failed")
GUARD = ("skip", "spike", "rollback", "raise", "not finite")  # what the guard records
_TAIL = 1 << 20  # bytes of metrics that are read: some thousand steps
_PACE = 50  # the pace is the median of this many steps
_SILENT_S, _SILENT_STEPS = 120.0, 20.0  # silent: longer than both, the latter in steps


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of one run.

    Attributes:
        name: The name of the run.
        state: done, preempted, diverged, failed or running; killed, or silent; waiting if it is planned and
            has no directory; unknown without a status; broken if its files cannot be read.
        reason: Why, if the run or its files record it.
        step: The last recorded step; 0 for none.
        steps: The steps of the whole run; 0 if unknown.
        loss: The last training loss in nats a token; NaN for none.
        val_loss: The last validation loss; NaN for none.
        recipe: The recipe's name; "" if unknown.
        path: Its directory.
        tokens_per_s: The median speed of the last steps; NaN if unknown.
        memory_bytes: The largest memory of the last steps; NaN if unknown.
        seconds_left: Time in steps until the end of a run at work, at the pace of the last steps; else None.
        recorded_at: Time of the last record, in seconds since 1970; 0 without one.
        guard: The last events of the guard.
    """

    name: str
    state: str = "waiting"
    reason: str = ""
    step: int = 0
    steps: int = 0
    loss: float = math.nan
    val_loss: float = math.nan
    recipe: str = ""
    path: Path = field(default=Path(), compare=False)
    tokens_per_s: float = math.nan
    memory_bytes: float = math.nan
    seconds_left: float | None = None
    recorded_at: float = 0.0
    guard: Sequence[Mapping[str, Any]] = ()

    @property
    def is_at_work(self) -> bool:
        """Whether a process trains it."""
        return self.state in ("running", "silent")

    @property
    def left(self) -> int:
        """The steps that remain; 0 for a run that has ended."""
        return 0 if self.state in ENDED else max(0, self.steps - self.step)


def list_runs(folder: Path) -> list[Progress]:
    """The progress of every run directory in a folder and its subfolders; sorted by path."""
    return [read_progress(path, time.time()) for path in sorted(_directories(folder, DEEPEST))]


def _directories(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        try:
            inside = [Path(entry) for entry in os.scandir(folder) if entry.is_dir()]
        except OSError:
            return
        for path in inside:
            yield from _directories(path, depth - 1)


def is_run(path: Path) -> bool:
    """Whether a directory looks like a run."""
    return any(os.path.exists(path / name) for name in (CONFIG, METRICS, STATUS, "checkpoints"))


def read_progress(path: Path, now: float, name: str = "") -> Progress:
    """The progress of the run in a directory at the time `now`, in seconds since 1970."""
    name = name or path.name
    try:
        config, lines = read_config(path / CONFIG), last_lines(path / METRICS)
        state, reason, has_diverged = read_state(path)
        recorded_at = (path / METRICS).stat().st_mtime if lines else 0.0
    except (UserError, OSError) as error:
        return Progress(name, "broken", str(error), path=path)
    if not config:
        return Progress(name, "broken", f"it has no {CONFIG}", path=path)
    records = [line for line in lines if "event" not in line]
    trained = [line for line in records if "loss" in line]
    recent, validated = trained[-_PACE:], [line for line in records if "val_loss" in line]
    step, steps = max((line["step"] for line in records), default=0), _set(config, "training", "steps")
    steps, step_s = steps if isinstance(steps, int) else 0, _median(recent, "step_ms") / 1000
    if has_diverged:
        state = "diverged"
    elif state == "running" and math.isfinite(step_s):
        state = "silent" if now - recorded_at > max(_SILENT_S, _SILENT_STEPS * step_s) else state
    left_s = max(0, steps - step) * step_s
    return Progress(
        name=name,
        state=state,
        reason=reason,
        step=step,
        steps=steps,
        loss=as_float(trained[-1]["loss"]) if trained else math.nan,
        val_loss=as_float(validated[-1]["val_loss"]) if validated else math.nan,
        recipe=str(_set(config, "recipe", "name") or ""),
        path=path,
        tokens_per_s=_median(recent, "tokens_per_s"),
        memory_bytes=max(_finite(recent, "memory_bytes"), default=math.nan),
        seconds_left=left_s if state == "running" and steps and math.isfinite(step_s) else None,
        recorded_at=recorded_at,
        guard=[line for line in lines if line.get("event") in GUARD],
    )


def last_lines(path: Path) -> list[dict[str, Any]]:
    """The steps and events at the end of a metrics file; torn lines are left out."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        lines = file.read().splitlines()
    return [record for line in lines if (record := parse_line(line)) is not None]


def _set(config: Mapping[str, Any], section: str, key: str) -> Any:
    table = config.get(section)
    return table.get(key) if isinstance(table, Mapping) else None


def _median(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.median(_finite(lines, key) or [math.nan])


def _finite(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [value for line in lines if math.isfinite(value := as_float(line.get(key)))]
