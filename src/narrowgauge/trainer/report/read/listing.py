"""Finds runs in folders, and reads how far each is. No content of a directory makes it fail.

Only the end of the metrics is read, so a folder of long runs is listed quickly.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.report.read.run import CONFIG, METRICS, STATUS, Run, read_run

DEEPEST = 3  # runs/compare-debug/fp8 is two below runs
_TAIL = 1 << 20  # bytes of metrics that are read: some thousand steps
_SILENT_S, _SILENT_STEPS = 120.0, 20.0  # silent: longer than both, the latter in steps


def list_runs(folder: Path) -> list[Run]:
    """Every run in a folder and its subfolders, as far as it is; sorted by path."""
    return [look_at(path) for path in folders(folder, is_run)]


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


def look_at(path: Path) -> Run:
    """The run in a directory with its last steps; it is broken if its files cannot be read."""
    try:
        run = read_run(path, _TAIL)
    except (UserError, OSError) as error:
        return Run(path.name, path, status="broken", reason=str(error))
    return with_silence(run) if run.config else replace(run, status="broken", reason=f"it has no {CONFIG}")


def with_silence(run: Run) -> Run:
    """The run; silent if it is running and has recorded nothing for much longer than its steps take."""
    longest = max(_SILENT_S, _SILENT_STEPS * (run.pace_s or float("inf")))
    is_silent = run.status == "running" and time.time() - run.recorded_at > longest
    return replace(run, status="silent") if is_silent else run


def as_json(run: Run) -> dict[str, Any]:
    """How far a run is; a loss is NaN without any."""
    return {
        "name": run.name,
        "state": run.status,
        "reason": run.reason,
        "step": run.step,
        "steps": run.planned_steps or 0,
        "loss": run.last_loss,
        "val_loss": run.last_val_loss,
        "recipe": run.recipe,
        "path": str(run.path),
        "tokens_per_s": run.tokens_per_s,
        "memory_bytes": run.peak_memory_bytes,
        "seconds_left": run.seconds_left,
        "recorded_at": run.recorded_at,
        "guard": run.guarded,
    }
