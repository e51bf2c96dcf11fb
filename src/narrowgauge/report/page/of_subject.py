"""What a page of a run or a comparison shows: the runs that have begun, and the progress of all."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from narrowgauge.errors import UserError
from narrowgauge.report.page.standing import time_left
from narrowgauge.report.read.progress import ENDED, Progress, read_progress
from narrowgauge.report.read.run import Run, read_run, with_distinct_names
from narrowgauge.report.read.stored import PlannedComparison
from narrowgauge.report.read.subject import Subject
from narrowgauge.report.verdict.rungs import Row, read_rows


def read_begun(paths: Sequence[Path]) -> list[Run]:
    """The runs that can be read; none without the first, with which the others are compared."""
    runs: list[Run] = []
    for path in paths:
        try:
            runs.append(read_run(path.resolve()))
        except (UserError, OSError):  # damaged, or removed between two looks
            if not runs:
                return []
    return with_distinct_names(runs)


def progress_of(one: Subject, now: float) -> list[Progress]:
    """The progress of each run of a subject; those that are only planned wait."""
    if one.planned is None:
        return [read_progress(path, now) for path in one.paths]
    rows = {(row.arm, row.seed, row.rung): row for row in rows_of(one.planned)}
    found = []
    for run in one.planned.runs:
        path, row = one.folder / run.name, rows.get((run.arm, run.seed, run.rung))
        if path.is_dir() and any(path.iterdir()):
            found.append(read_progress(path, now))
        elif row is not None:  # trained on another machine
            found.append(Progress(run.name, row.status, "", run.steps, run.steps, val_loss=row.own_loss))
        else:
            found.append(Progress(run.name, steps=run.steps))
    return found


def together(one: Subject, found: Sequence[Progress]) -> Progress:
    """The runs of a subject as one row of a list."""
    if not one.is_compared:
        return replace(found[0], name=one.name)
    states = [run.state for run in found]
    worst = next((s for s in ("running", "silent", "killed", "preempted", "waiting") if s in states), "done")
    return Progress(
        name=f"{one.name}: {sum(state in ENDED for state in states)} of {len(found)} runs ended",
        state=worst,
        step=sum(run.step for run in found),
        steps=sum(run.steps for run in found),
        seconds_left=time_left(found),
        recorded_at=max((run.recorded_at for run in found), default=0.0),
        guard=[event for run in found for event in run.guard],
    )


def rows_of(planned: PlannedComparison) -> list[Row]:
    """The results so far, the reference's first; empty for a comparison that is not measured."""
    try:
        rows = read_rows(Path(planned.rows)) if planned.rows else []
    except UserError:  # not written yet
        return []
    return rows if rows and rows[0].arm == planned.reference else []
