"""The pages of what is watched: rendered when a reader asks, and only if a file has changed since.

Reading and drawing a long run takes a while. A page is made again at the earliest after nine times as long as
it took, unless a run has begun or ended, so a watcher takes at most a tenth of a core, however fast the runs
write.
"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from narrowgauge.errors import UserError
from narrowgauge.report.live.server import Page
from narrowgauge.report.live.subject import Subject, state_of_run, subjects
from narrowgauge.report.page.page import Live, render_report
from narrowgauge.report.page.standing import standing, time_left
from narrowgauge.report.read.comparison import PlannedComparison
from narrowgauge.report.read.progress import Progress, read_progress
from narrowgauge.report.read.run import Run, read_run, with_distinct_names
from narrowgauge.report.verdict.rungs import Row, read_rows

SAVE = "save"
_SHARE = 9.0  # a page rests for this many times as long as making it took

#: What a comparison adds to its page: sentences on what it can see, and HTML that follows the charts.
Extra = Callable[[Subject, Sequence[Run]], tuple[Sequence[str], str]]


@dataclass(frozen=True, slots=True)
class _Made:
    tag: str
    html: str
    ends: object
    rests_until: float


class Watched:
    """The pages of some paths; an instance answers the requests of a server."""

    def __init__(
        self, paths: Sequence[Path], extra: Extra, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Watch paths, which need not exist yet."""
        self.paths, self.extra, self.clock = list(paths), extra, clock
        self._made: dict[str, _Made] = {}
        self._runs: dict[Path, tuple[object, Run]] = {}
        self._states: dict[Path, tuple[object, Progress]] = {}
        self._lock = threading.Lock()

    def __call__(self, address: str) -> Page | None:
        """The page at an address: "" or "KEY/" for one that follows, with "save" behind it to be kept."""
        head, _, last = address.rpartition("/")
        found, is_one = subjects(self.paths)
        if head:
            chosen = next((one for one in found if one.key == head and not is_one), None)
        else:
            chosen = found[0] if is_one and found else None
        if last not in ("", SAVE) or (head and chosen is None):
            return None
        name = re.sub(r"[^\w.,=+-]+", "-", chosen.name if chosen else self.name, flags=re.ASCII).strip("-")
        if last == SAVE:
            return Page(f"save-{time.time_ns()}", lambda: self._html(chosen, found, None), f"{name}.html")
        tag, ends = self._tag(chosen, found), [one.ends() for one in ([chosen] if chosen else found)]
        made = self._made.get(address)
        if made is not None and (made.tag == tag or (made.ends == ends and self.clock() < made.rests_until)):
            return Page(made.tag, lambda: made.html)
        live = Live(tag, SAVE, name or "narrowgauge", "../" if head else "")
        return Page(tag, lambda: self._make(address, tag, ends, lambda: self._html(chosen, found, live)))

    @property
    def name(self) -> str:
        """What is watched, in a word."""
        return self.paths[0].resolve().name if len(self.paths) == 1 else f"{len(self.paths)} runs"

    def archive(self) -> str:
        """The page as it is now, for a file; of a folder the list of its runs."""
        page = self(SAVE)
        assert page is not None
        return page.html()

    def _tag(self, chosen: Subject | None, found: Sequence[Subject]) -> str:
        now = time.time()
        return chosen.state(now) if chosen else "-".join(["list", *(one.state(now) for one in found)])

    def _make(self, address: str, tag: str, ends: object, html: Callable[[], str]) -> str:
        """Make a page, one at a time: a second reader gets what the first waited for."""
        with self._lock:
            made = self._made.get(address)
            if made is not None and made.tag == tag:
                return made.html
            begun = self.clock()
            text = html()
            ended = self.clock()
            self._made[address] = _Made(tag, text, ends, ended + _SHARE * (ended - begun))
            return text

    def _html(self, chosen: Subject | None, found: Sequence[Subject], live: Live | None) -> str:
        if chosen is None:
            return self._list(found, live)
        states = self._progress_of(chosen, time.time())
        runs = self._read(chosen.paths)
        sentences, more = self.extra(chosen, runs)
        section = standing(states, sentences, chosen.is_compared)
        command = chosen.planned.command if chosen.planned else ""
        return render_report(runs, command, more, section, live, (chosen.name, "No run can be drawn yet."))

    def _list(self, found: Sequence[Subject], live: Live | None) -> str:
        """The page of a folder: each run and comparison in a row."""
        now = time.time()
        rows = [together(one, self._progress_of(one, now)) for one in found]
        if not rows:
            return render_report([], live=live)
        links = [one.key for one in found] if live else ()
        lead = "Each name leads to its own page." if live else "Its runs and comparisons."
        where = standing(rows, links=links, noun="runs and comparisons")
        return render_report([], where=where, live=live, empty=(self.name, lead))

    def _progress_of(self, subject: Subject, now: float) -> list[Progress]:
        """The progress of each run of a subject; those that are only planned wait."""
        if subject.planned is None or subject.folder is None:
            return [self._progress(path, now) for path in subject.paths]
        rows = {(row.arm, row.seed, row.rung): row for row in rows_of(subject.planned)}
        found = []
        for run in subject.planned.runs:
            path = subject.folder / run.name
            row = rows.get((run.arm, run.seed, run.rung))
            if path.is_dir() and any(path.iterdir()):
                found.append(self._progress(path, now))
            elif row is not None:  # trained on another machine
                found.append(Progress(run.name, row.status, "", run.steps, run.steps, val_loss=row.own_loss))
            else:
                found.append(Progress(run.name, steps=run.steps))
        return found

    def _progress(self, path: Path, now: float) -> Progress:
        """The progress of a run, read again if it has changed."""
        state = state_of_run(path, now)
        known = self._states.get(path)
        if known is None or known[0] != state:
            known = self._states[path] = state, read_progress(path, now)
        return known[1]

    def _read(self, paths: Sequence[Path]) -> list[Run]:
        """The runs; those whose files have not changed since are not read again, none without the first."""
        runs: list[Run] = []
        for path in paths:
            state = state_of_run(path, 0.0)
            known = self._runs.get(path)
            if known is None or known[0] != state:
                try:
                    known = state, read_run(path)
                except (UserError, OSError):  # damaged, or removed between two looks
                    if not runs:  # the reference of all others
                        return []
                    continue
                self._runs[path] = known
            runs.append(known[1])
        return with_distinct_names([replace(run, path=run.path.resolve()) for run in runs])


def rows_of(planned: PlannedComparison) -> list[Row]:
    """The results so far, the reference's first; empty for a comparison that is not measured."""
    try:
        rows = read_rows(Path(planned.rows)) if planned.rows else []
    except UserError:  # not written yet
        return []
    return rows if rows and rows[0].arm == planned.reference else []


def together(subject: Subject, found: Sequence[Progress]) -> Progress:
    """The runs of a subject as one row of a list."""
    if not subject.is_compared and len(found) == 1:
        return replace(found[0], name=subject.name)
    states = [one.state for one in found]
    worst = next((s for s in ("running", "silent", "killed", "preempted", "waiting") if s in states), "done")
    done = sum(state in ("done", "diverged", "failed") for state in states)
    return Progress(
        name=f"{subject.name}: {done} of {len(found)} runs ended",
        state=worst,
        step=sum(one.step for one in found),
        steps=sum(one.steps for one in found),
        seconds_left=time_left(found),
        recorded_at=max((one.recorded_at for one in found), default=0.0),
        guard=[event for one in found for event in one.guard],
    )
