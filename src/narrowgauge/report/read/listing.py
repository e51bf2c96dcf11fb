"""Lists the run directories below a folder, each in one line: state, step, loss. No content makes it fail.

Only the end of `metrics.jsonl` is read, so a folder of long runs is listed quickly.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import UserError
from narrowgauge.report.read.records import as_float, parse_line, read_config
from narrowgauge.report.read.run import CONFIG, METRICS, STATUS, read_state

DEEPEST = 3  # runs/compare-debug/fp8 is two below runs
_TAIL = 1 << 20  # bytes of metrics that are read: some thousand steps


@dataclass(frozen=True)
class RunSummary:
    """One run directory.

    Attributes:
        path: The directory.
        state: done, preempted, failed or running; killed if the status is running but no process holds the
            directory; unknown without a status; broken if its files cannot be read.
        reason: Why, if the run or its files record it.
        recipe: The recipe's name, "" if unknown.
        step: The last step recorded, 0 for none.
        steps: The number of steps of the whole run, 0 if unknown.
        loss: The training loss of the last step in nats per token; NaN for none.
        val_loss: The last validation loss, NaN for none.
    """

    path: Path
    state: str
    reason: str = ""
    recipe: str = ""
    step: int = 0
    steps: int = 0
    loss: float = math.nan
    val_loss: float = math.nan


def list_runs(folder: Path) -> list[RunSummary]:
    """Summarize every run directory in a folder and its subfolders; sorted by path."""
    return [summarize(path) for path in sorted(_directories(folder, DEEPEST))]


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
    names = (CONFIG, METRICS, STATUS, "checkpoints")
    return any(os.path.exists(path / name) for name in names)


def summarize(path: Path) -> RunSummary:
    """The summary of a directory that looks like a run."""
    try:
        config = read_config(path / CONFIG)
        records = last_records(path / METRICS)
        state, reason = read_state(path)
    except (UserError, OSError) as error:
        return RunSummary(path, "broken", str(error))
    if not config:
        return RunSummary(path, "broken", f"it has no {CONFIG}")
    training, recipe = config.get("training"), config.get("recipe")
    steps = training.get("steps") if isinstance(training, dict) else 0
    name = recipe.get("name") if isinstance(recipe, dict) else ""
    trained = [record for record in records if "loss" in record]
    validated = [record for record in records if "val_loss" in record]
    return RunSummary(
        path=path,
        state=state,
        reason=reason,
        recipe=str(name or ""),
        step=max((record["step"] for record in records), default=0),
        steps=steps if isinstance(steps, int) else 0,
        loss=as_float(trained[-1]["loss"]) if trained else math.nan,
        val_loss=as_float(validated[-1]["val_loss"]) if validated else math.nan,
    )


def last_records(path: Path) -> list[dict[str, Any]]:
    """The records of steps at the end of a metrics file; torn lines are left out."""
    return [line for line in last_lines(path) if "event" not in line]


def last_lines(path: Path) -> list[dict[str, Any]]:
    """The steps and events at the end of a metrics file; torn lines are left out."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        lines = file.read().splitlines()
    parsed = (parse_line(line) for line in lines)
    return [record for record in parsed if record is not None]
