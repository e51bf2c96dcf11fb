"""The progress of a run: state, last step, time left. Only the ends of its files are read.

The status of a killed run is still "running", so its lock decides: if no process holds it, the run was
killed. A process that holds it and has recorded nothing for much longer than its steps take is silent.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.report.read.listing import RunSummary, last_lines, summarize
from narrowgauge.report.read.records import as_float
from narrowgauge.report.read.run import METRICS

DIVERGED_REASONS = ("Diverged", "PoisonedError")  # the reason of a run that diverged begins with one
ENDED = ("done", "diverged", "failed")
GUARD = ("skip", "spike", "rollback", "raise", "not finite")  # what the guard records
_PACE = 50  # the pace is the median of this many steps
_SILENT_S, _SILENT_STEPS = 120.0, 20.0  # silent: longer than both, the latter in steps


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of one run.

    Attributes:
        name: The name of the run.
        state: That of `RunSummary`; also diverged, silent (its process lives, and records nothing), and
            waiting (planned, without a directory).
        reason: Why, if the run or its files record it.
        step: The last recorded step; 0 for none.
        steps: The steps of the whole run; 0 if unknown.
        loss: The last training loss in nats a token; NaN for none.
        val_loss: The last validation loss; NaN for none.
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


def read_progress(path: Path, now: float, name: str = "") -> Progress:
    """The progress of the run in a directory at the time `now`, in seconds since 1970."""
    summary = summarize(path)
    lines = last_lines(path / METRICS)
    recent = [line for line in lines if "event" not in line and "loss" in line][-_PACE:]
    step_s = _median(recent, "step_ms") / 1000
    recorded_at = _changed(path / METRICS)
    state = _state(summary, now - recorded_at if recorded_at else 0.0, step_s)
    left = max(0, summary.steps - summary.step)
    is_known = state == "running" and summary.steps > 0 and math.isfinite(step_s)
    sizes = [size for line in recent if math.isfinite(size := as_float(line.get("memory_bytes")))]
    return Progress(
        name=name or path.name,
        state=state,
        reason=summary.reason,
        step=summary.step,
        steps=summary.steps,
        loss=summary.loss,
        val_loss=summary.val_loss,
        tokens_per_s=_median(recent, "tokens_per_s"),
        memory_bytes=max(sizes, default=math.nan),
        seconds_left=left * step_s if is_known else None,
        recorded_at=recorded_at,
        guard=[line for line in lines if line.get("event") in GUARD],
    )


def _state(summary: RunSummary, silence_s: float, step_s: float) -> str:
    if summary.state == "failed" and summary.reason.startswith(DIVERGED_REASONS):
        return "diverged"
    if summary.state == "running" and math.isfinite(step_s):
        return "silent" if silence_s > max(_SILENT_S, _SILENT_STEPS * step_s) else "running"
    return summary.state


def _median(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [value for line in lines if math.isfinite(value := as_float(line.get(key)))]
    return statistics.median(values) if values else math.nan


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
