"""What a path holds, a run, a comparison, or a folder of both, and the section on where its runs stand.

A comparison is a folder with the plan that `compare` wrote, or several runs that are named together. A folder
is searched up to three levels below it. Of each run the section has state, progress, loss, speed, memory,
time left, and the last event of the guard.

Verdicts of unfinished comparisons are interim. The interval of the rule holds for one look at a fixed end. A
reader who looks again and again, and stops at the first interval that excludes zero, finds a difference that
does not exist more often than one time in twenty. The section states this.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from narrowgauge.system.errors import UserError
from narrowgauge.system.units import human_bytes, human_count, human_duration
from narrowgauge.trainer.report.page.curves import event_name, reason_of
from narrowgauge.trainer.report.page.html import Table, part
from narrowgauge.trainer.report.read.records import Validation
from narrowgauge.trainer.report.read.run import (
    ENDED,
    Run,
    RunState,
    as_json,
    folders,
    is_run,
    look_at,
    read_run,
    with_distinct_names,
)
from narrowgauge.trainer.report.read.stored import COMPARISON, PlannedComparison, read_stored
from narrowgauge.trainer.report.verdict.verdict import DIVERGED, Row, read_rows

_INTERIM = (
    "Verdicts are interim until every run is done: an interval holds for one look at the planned end. "
    "Stopping at the first one that excludes zero finds differences that do not exist."
)
_STATES = {  # in a sentence, and what to do; the reason of a preempted run names it
    "killed": ("was killed", "the same command line continues it"),
    "silent": ("is silent", "its process lives, and has recorded nothing for much longer than a step takes"),
    "preempted": ("was stopped", ""),
    "diverged": ("has diverged", ""),
    "failed": ("has failed", ""),
    "broken": ("cannot be read", "its files cannot be read"),
}
_BY_NEED = ("running", "silent", "killed", "preempted", "waiting")
_COLUMNS = ("run", "state", "step", "loss", "val loss", "tokens/s", "memory", "time left", "last record")


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
    found = []
    for folder in folders(first, lambda path: is_run(path) or _plan(path) is not None):
        name = folder.resolve().name if folder == first else folder.relative_to(first).as_posix()
        planned = None if is_run(folder) else _plan(folder)
        found.append(compared(folder, planned, name) if planned else Subject(name, folder, (folder,)))
    return found, [one.folder for one in found] == [first]


def _plan(folder: Path) -> PlannedComparison | None:
    return read_stored(PlannedComparison, folder / COMPARISON)


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


def standing(
    rows: Mapping[str, Sequence[Run]],
    sentences: Sequence[str] = (),
    is_compared: bool = False,
    links: Mapping[str, str] | None = None,
) -> Markup:
    """A section with a row for each run, or for all runs of a comparison; empty without runs.

    Where runs are compared an interim verdict needs its caution. `links` are the pages of rows that have one.
    """
    if not rows:
        return Markup()
    states, guard = [_state(runs) for runs in rows.values()], []
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    text = f"{len(states)} runs: {counts}."
    if len(states) == 1:
        text = f"The run {_STATES.get(states[0], (f'is {states[0]}',))[0]}."
    if (left := time_left([run for runs in rows.values() for run in runs])) is not None:
        text += f" About {human_duration(left)} left at the pace of the last steps."
    told = [text, *sentences]
    told += [_INTERIM] if is_compared and any(state not in ENDED for state in states) else []
    for name, runs in rows.items():
        if events := [event for run in runs for event in run.guarded]:
            reason = f", {reason[:300]}" if (reason := reason_of(events[-1])) else ""
            many = f" ({len(events)} events of the guard)" if len(events) > 1 else ""
            guard.append(f"{name}: {event_name(events[-1])} at step {events[-1]['step']:,}{reason}{many}")
    cells = [_row(name, runs, (links or {}).get(name, "")) for name, runs in rows.items()]
    return part("standing", told, Table("Where each run stands", _COLUMNS, cells, ("state",)), guard)


def _state(runs: Sequence[Run]) -> str:
    """The state of one or more runs: the one that most needs attention."""
    states = [run.status for run in runs]
    return states[0] if len(runs) == 1 else next((word for word in _BY_NEED if word in states), "done")


def _row(name: str, runs: Sequence[Run], link: str) -> list[str]:
    only, state, left = runs[0] if len(runs) == 1 else Run(name, Path()), _state(runs), time_left(runs)
    said = as_json(only)
    if len(runs) > 1:
        name = f"{name}: {sum(run.status in ENDED for run in runs)} of {len(runs)} runs ended"
    # the recorded reason of an end that was not planned, or what to do
    reason = only.reason if only.status in ("failed", "diverged", "preempted", "broken") else ""
    why = "; ".join(filter(None, (reason, _STATES.get(only.status, ("", ""))[1])))
    step, steps = sum(run.step for run in runs), sum(run.planned_steps or 0 for run in runs)
    share, progress = min(1.0, step / (steps or 1)), f"{step:,}"
    if steps:
        bar = Markup('{:,} of {:,}<progress max="1" value="{:.4f}" aria-label="{:.0f} %"></progress>')
        progress = bar.format(step, steps, share, 100 * share)
    recorded = max(run.recorded_at for run in runs)  # the script of a live page writes its age in its place
    when = Markup('<time datetime="{0:%Y-%m-%dT%H:%M:%SZ}">{0:%Y-%m-%d %H:%M:%S} UTC</time>')
    return [
        Markup('<a href="{}">{}</a>').format(quote(link), name) if link else name,
        Markup('<span class="state {0}">{0}</span>').format(state)
        + (Markup('<div class="why muted">{}</div>').format(why) if why else ""),
        progress,
        *(f"{said[key]:.4f}" if math.isfinite(said[key]) else "-" for key in ("loss", "val_loss")),
        "-" if said["tokens_per_s"] is None else human_count(said["tokens_per_s"]),
        "-" if said["memory_bytes"] is None else human_bytes(said["memory_bytes"]),
        "-" if left is None else human_duration(left),
        when.format(datetime.fromtimestamp(recorded, UTC)) if recorded else "-",
    ]


def time_left(runs: Sequence[Run]) -> float | None:
    """Seconds until all runs have ended, if as many as now keep training at the pace of those at work.

    None if no run is at work, or none has a pace. Validations, saves and starts are left out.
    """
    paces = [run.seconds_left / run.left for run in runs if run.seconds_left is not None and run.left]
    at_work = [run for run in runs if run.is_at_work]
    if not paces:
        return None
    pace = sum(paces) / len(paces)
    own = [pace * run.left if run.seconds_left is None else run.seconds_left for run in at_work]
    waiting = sum(pace * run.left for run in runs if run.status in ("waiting", "preempted", "killed"))
    return own[0] if len(runs) == 1 else max(max(own), (sum(own) + waiting) / len(at_work))
