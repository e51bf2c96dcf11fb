"""The table shown while runs train: running jobs, finished runs, the time left."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from narrowgauge.system.units import human_count
from narrowgauge.trainer.experiment.jobs import Job
from narrowgauge.trainer.report.read.progress import list_runs

_EVERY_S, _LINE_EVERY_S = 2.0, 30.0  # refresh on a terminal; longest silence elsewhere


class ProgressTable:
    """Shows running jobs on a terminal; elsewhere prints a line for each finished job, and every 30 s."""

    def __init__(
        self,
        console: Console,
        left_tokens: int,
        runs: int,
        done: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show an experiment: `done` of `runs` runs are finished, and `left_tokens` remain to be trained."""
        self.console, self.left, self.runs, self.done = console, left_tokens, runs, done
        self.trained = 0  # tokens of finished runs since the start
        self.clock = clock
        self.started = self.shown = clock()
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "ProgressTable":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, jobs: Sequence[Job], ended: Job | None) -> None:
        """Show the running jobs; `ended` has just succeeded."""
        if ended is not None:
            self.trained += ended.tokens
            if ended.is_last:
                self.done += 1
                self._line(f"{self.done}/{self.runs}  {ended.name}  {self._left(jobs)}")
                self.shown = self.clock()
        now = self.clock()
        if self.console.is_terminal and (ended is not None or now - self.shown > _EVERY_S):
            self.shown = now
            self._live.update(self._table(jobs), refresh=True)
        elif not self.console.is_terminal and now - self.shown > _LINE_EVERY_S:
            self.shown = now
            at_work = ", ".join(" ".join(filter(None, _facts(job))) for job in jobs)
            self._line(f"{self.done}/{self.runs}  {self._left(jobs)}; {at_work}")

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _table(self, jobs: Sequence[Job]) -> Group:
        table = Table(box=None, pad_edge=False)
        for column in ("run", "step", "loss", "state"):
            table.add_column(column, justify="left" if column in ("run", "state") else "right")
        for job in jobs:
            table.add_row(*_facts(job))
        return Group(f"{self.done} of {self.runs} runs done, {self._left(jobs)}", table)

    def _left(self, jobs: Sequence[Job]) -> str:
        """Time left at the pace since the start."""
        running = sum(job.tokens * _share(job) for job in jobs)
        done, seconds = self.trained + running, self.clock() - self.started
        if done <= 0 or seconds < 1:
            return f"{human_count(self.left)} tokens left"
        left = max(self.left - done, 0)
        minutes = round(left / done * seconds / 60)
        return f"{human_count(left)} tokens left, {minutes // 60}:{minutes % 60:02} h at this pace"


def _facts(job: Job) -> tuple[str, str, str, str]:
    """Name, step, loss and state of a running job."""
    at = next(iter(list_runs(job.directory)), None) if job.directory.is_dir() else None
    if at is None:
        return job.name, "", "", "starts"
    return job.name, f"{at.step}/{at.steps}", f"{at.loss:.4f}", "trains" if job.tokens else "is evaluated"


def _share(job: Job) -> float:
    """The completed share of a job; a branch counts from its beginning."""
    at = next(iter(list_runs(job.directory)), None) if job.directory.is_dir() else None
    return at.step / at.steps if at is not None and at.steps else 0.0
