"""What a person sees while a run is on its way: a live line on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_LINE_EVERY_S = 30.0  # where there is no terminal, a long stage says how far it is


class Display:
    """Shows stages of preparation and steps of training; `console` decides whether there is a terminal."""

    def __init__(self, console: Console, steps: int, every: int) -> None:
        self.console, self.steps, self.every = console, steps, every
        self.started = time.monotonic()
        self.first_step: int | None = None
        self._live = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, float] = {}  # when a line about a stage was last printed

    def __enter__(self) -> "Display":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stage(self, name: str, done: int, total: int, facts: str = "") -> None:
        """How many bytes a stage of preparation has done, of how many (0 = not known), and more facts."""
        if not self.console.is_terminal:
            now = time.monotonic()
            if name not in self._told:
                self.say(f"data: {name} ...")
            elif now - self._told[name] < _LINE_EVERY_S:
                return
            else:
                self.say(f"data: {name} {_bytes(done, total)}  {facts}".rstrip())
            self._told[name] = now
            return
        if name not in self._tasks:
            for other in self._tasks.values():
                self._live.update(other, visible=False)
            self._tasks[name] = self._live.add_task(f"data: {name}", facts="")
        text = f"{_bytes(done, total)}  {facts}"
        self._live.update(self._tasks[name], completed=done, total=total or None, facts=text)
        if total and done == total:
            self._live.update(self._tasks[name], visible=False)

    def step(self, line: Mapping[str, Any]) -> None:
        """One finished step, as it is recorded in the metrics."""
        step = line["step"]
        if self.first_step is None:
            self.first_step, self.started = step, time.monotonic()
        facts = f"loss {line['loss']:.4f}  {line['tokens_per_s']:,.0f} tokens/s"
        if "val_loss" in line:
            facts += f"  val loss {line['val_loss']:.4f}"
        if self.console.is_terminal:
            if "steps" not in self._tasks:
                self._tasks["steps"] = self._live.add_task("training", total=self.steps, facts="")
            so_far = f"{step}/{self.steps}  {facts}"
            self._live.update(self._tasks["steps"], completed=step, facts=so_far)
            if "val_loss" in line:
                self.say(f"step {step:>6}/{self.steps}  {facts}")
        elif step % self.every == 0 or step == self.steps or "val_loss" in line:
            self.say(f"step {step:>6}/{self.steps}  {facts}  left {self._left(step)}")

    def _left(self, step: int) -> str:
        """Time left at the pace so far."""
        assert self.first_step is not None
        done = step - self.first_step
        if not done:
            return "?"
        seconds = round((time.monotonic() - self.started) / done * (self.steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _bytes(done: int, total: int) -> str:
    return f"{done / 1e6:,.1f}" + (f"/{total / 1e6:,.1f}" if total else "") + " MB"
