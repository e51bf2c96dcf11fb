"""What a path holds, a run, a comparison, or a folder of both, and how far each of its runs is.

A comparison is a folder with the plan that `compare` wrote, or several runs that are named together. A folder
is searched up to three levels below it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.report.read.records import Validation
from narrowgauge.trainer.report.read.run import (
    Run,
    RunState,
    folders,
    is_run,
    look_at,
    read_run,
    with_distinct_names,
)
from narrowgauge.trainer.report.read.stored import COMPARISON, PlannedComparison, read_stored
from narrowgauge.trainer.report.verdict.verdict import DIVERGED, Row, read_rows


@dataclass(frozen=True, slots=True)
class Subject:
    """A run or a comparison."""

    name: str  # what a list calls it
    folder: Path  # its directory; of runs that are named together, that of the first
    paths: tuple[Path, ...]  # the directories of its runs that have begun, the reference first
    planned: PlannedComparison | None = None  # the plan of a comparison; None if there is none

    @property
    def is_compared(self) -> bool:
        """Whether it is a comparison."""
        return self.planned is not None or len(self.paths) > 1


def subjects(paths: Sequence[Path]) -> tuple[list[Subject], bool]:
    """What some paths hold, and whether it is one subject, which needs no list.

    Several paths are runs of one comparison, the first its reference; without that there is nothing yet.
    """
    first, *others = paths
    if others:
        begun = tuple(filter(is_run, paths))
        return ([Subject(f"{len(paths)} runs", first, begun)] if is_run(first) else []), True
    found = [_subject(path, first) for path in folders(first, lambda path: is_run(path) or bool(_plan(path)))]
    return found, [one.folder for one in found] == [first]


def _plan(folder: Path) -> PlannedComparison | None:
    return read_stored(PlannedComparison, folder / COMPARISON)


def _subject(folder: Path, root: Path) -> Subject:
    name = folder.resolve().name if folder == root else folder.relative_to(root).as_posix()
    if is_run(folder) or (planned := _plan(folder)) is None:
        return Subject(name, folder, (folder,))
    return compared(folder, planned, name)


def compared(folder: Path, planned: PlannedComparison, name: str = "") -> Subject:
    """The planned comparison in a folder; no run counts as begun before the reference's first."""
    highest = [run for run in planned.runs if run.rung == planned.rungs]
    highest.sort(key=lambda run: run.arm != planned.reference)
    begun = tuple(path for run in highest if is_run(path := folder / run.name))
    has_reference = begun and begun[0].name == highest[0].name
    return Subject(name or folder.resolve().name, folder, begun if has_reference else (), planned)


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


def runs_of(one: Subject) -> list[Run]:
    """Each run of a subject as far as it is; those that are only planned wait."""
    if one.planned is None:
        return [look_at(path) for path in one.paths]
    rows = {row.key: row for row in rows_of(one)}
    found = []
    for run in one.planned.runs:
        path, row = one.folder / run.name, rows.get(run.key)
        planned = Run(run.name, path, {"training": {"steps": run.steps}})
        if path.is_dir() and any(path.iterdir()):
            planned = look_at(path)
        elif row is not None:  # trained on another machine
            state: RunState = "diverged" if row.status == DIVERGED else "done"
            at = Validation(run.steps, run.tokens, row.own_loss)
            planned = replace(planned, status=state, validation=[at])
        found.append(planned)
    return found


def rows_of(one: Subject) -> list[Row]:
    """The results so far, the reference's first; empty for a comparison that is not measured."""
    if one.planned is None or not one.planned.rows:
        return []
    try:
        rows = read_rows(one.folder / one.planned.rows)
    except UserError:  # not written yet
        return []
    return rows if rows and rows[0].arm == one.planned.reference else []
