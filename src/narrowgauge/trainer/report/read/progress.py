"""The progress of runs: state, last step, losses, time left. No content of a directory makes it fail.

Only the end of the metrics is read, so a folder of long runs is listed quickly.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.report.read.run import CONFIG, ENDED, METRICS, STATUS, Run, RunState, read_run
from narrowgauge.trainer.report.read.steps import finite

DEEPEST = 3  # runs/compare-debug/fp8 is two below runs
GUARD = ("skip", "spike", "rollback", "raise", "not finite")  # what the guard records
_TAIL = 1 << 20  # bytes of metrics that are read: some thousand steps
_PACE = 50  # the pace is the median of this many steps
_SILENT_S, _SILENT_STEPS = 120.0, 20.0  # silent: longer than both, the latter in steps


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of one run.

    Attributes:
        name: The name of the run.
        state: Its state (`read.run`).
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
    state: RunState = "waiting"
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
    return [read_progress(path, time.time()) for path in folders(folder, is_run)]


def folders(folder: Path, is_wanted: Callable[[Path], bool], depth: int = DEEPEST) -> Iterator[Path]:
    """A folder, or those up to three levels below it that are wanted, by name; none lies in another."""
    if is_wanted(folder):
        yield folder
    elif depth:
        try:
            inside = sorted(Path(entry) for entry in os.scandir(folder) if entry.is_dir())
        except OSError:
            return
        for path in inside:
            yield from folders(path, is_wanted, depth - 1)


def is_run(path: Path) -> bool:
    """Whether a directory looks like a run."""
    return any(os.path.exists(path / name) for name in (CONFIG, METRICS, STATUS, "checkpoints"))


def read_progress(path: Path, now: float, name: str = "") -> Progress:
    """The progress of the run in a directory at the time `now`, in seconds since 1970."""
    name = name or path.name
    try:
        return _progress(read_run(path, _TAIL), now, name)
    except (UserError, OSError) as error:
        return Progress(name, "broken", str(error), path=path)


def _progress(run: Run, now: float, name: str) -> Progress:
    if not run.config:
        return Progress(name, "broken", f"it has no {CONFIG}", path=run.path)
    recent, steps = run.steps[-_PACE:], run.planned_steps or 0
    reached = [one.step for one in recent[-1:]] + [one.step for one in run.validation[-1:]]
    step = max(reached, default=0)
    recorded_at = (run.path / METRICS).stat().st_mtime if step or run.events else 0.0
    step_s = statistics.median(finite(recent, "step_ms") or [math.nan]) / 1000
    is_running, has_pace = run.status == "running", math.isfinite(step_s)
    is_silent = is_running and has_pace and now - recorded_at > max(_SILENT_S, _SILENT_STEPS * step_s)
    state: RunState = "silent" if is_silent else run.status
    return Progress(
        name=name,
        state=state,
        reason=run.reason,
        step=step,
        steps=steps,
        loss=recent[-1].loss if recent else math.nan,
        val_loss=run.validation[-1].val_loss if run.validation else math.nan,
        recipe=str(run.setting("recipe", "name") or ""),
        path=run.path,
        tokens_per_s=statistics.median(finite(recent, "tokens_per_s") or [math.nan]),
        memory_bytes=max(finite(recent, "memory_bytes"), default=math.nan),
        seconds_left=max(0, steps - step) * step_s if state == "running" and steps and has_pace else None,
        recorded_at=recorded_at,
        guard=[event for event in run.events if event["event"] in GUARD],
    )
