"""The progress shown while runs train: running jobs, finished runs, the time left."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from narrowgauge.system.units import human_count
from narrowgauge.trainer.experiment.jobs import Job
from narrowgauge.trainer.report.read.listing import look_at

_EVERY_S, _LINE_EVERY_S = 2.0, 30.0  # refresh on a terminal; longest silence elsewhere


class ProgressLine:
    """Prints a line for each finished run; shows running jobs on a terminal, elsewhere every 30 s."""

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

    def __enter__(self) -> "ProgressLine":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, jobs: Sequence[Job], ended: Job | None) -> None:
        """Show the running jobs; `ended` has just succeeded."""
        self.trained += ended.tokens if ended else 0
        result, now = ended.name if ended and ended.is_last else "", self.clock()
        self.done += bool(result)
        if not result and now - self.shown <= (_EVERY_S if self.console.is_terminal else _LINE_EVERY_S):
            return
        self.shown = now
        states = [_state(job) for job in jobs]
        trained, passed = self.trained + sum(tokens for _, tokens in states), now - self.started
        left = max(self.left - trained, 0)
        text = f"{human_count(left)} tokens left"
        if trained > 0 and passed >= 1:
            minutes = round(left / trained * passed / 60)
            text += f", {minutes // 60}:{minutes % 60:02} h at this pace"
        at_work = f"{self.done}/{self.runs}  {text}; {', '.join(words for words, _ in states)}"
        if self.console.is_terminal:
            self._live.update(Text(at_work), refresh=True)
        if result or not self.console.is_terminal:
            line = f"{self.done}/{self.runs}  {result}  {text}" if result else at_work
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _state(job: Job) -> tuple[str, float]:
    """Name, step, loss and state of a running job, and the tokens that it has trained on.

    A branch counts from its beginning.
    """
    run = look_at(job.directory)
    if not run.steps or not run.planned_steps:
        return f"{job.name} starts", 0.0
    state = "trains" if job.tokens else "is evaluated"
    words = f"{job.name} {run.step}/{run.planned_steps} {run.last_loss:.4f} {state}"
    return words, job.tokens * run.step / run.planned_steps
