"""Progress display of a run: a live line on a terminal, plain lines elsewhere."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_LINE_EVERY_S = 10.0  # longest silence between two steps, or parts of a stage, without a terminal


class Display:
    """Shows stages of preparation and steps of training; `console` decides whether there is a terminal.

    Without one, a step prints a line every `every` steps, and 10 seconds after the last line.
    """

    def __init__(
        self, console: Console, steps: int, every: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console, self.steps, self.every, self.clock = console, steps, every, clock
        self.started = self.last_step_line = clock()
        self.first_step: int | None = None
        self._speeds = deque[float](maxlen=100)  # of steps since the last line
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
        self._last_line: dict[str, float] = {}  # time of the last line of each stage

    def __enter__(self) -> "Display":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def log(self, line: str) -> None:
        """Print a permanent line, with "?" for what the console cannot hold: another's is often strict."""
        line = line.encode(self.console.encoding, "replace").decode(self.console.encoding)
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stage(self, name: str, done: int, total: int, facts: str = "") -> None:
        """Show the progress of a stage of preparation: bytes done, in total (0 = unknown), more facts."""
        size = f"{done / 1e6:,.1f}" + (f"/{total / 1e6:,.1f}" if total else "") + " MB"
        if not self.console.is_terminal:
            now = self.clock()
            if now - self._last_line.get(name, -inf) >= _LINE_EVERY_S:
                said = f"{size}  {facts}".rstrip() if name in self._last_line else "..."
                self.log(f"data: {name} {said}")
                self._last_line[name] = now
            return
        if name not in self._tasks:
            for other in self._tasks.values():
                self._live.update(other, visible=False)
            self._tasks[name] = self._live.add_task(f"data: {name}", facts="")
        self._live.update(self._tasks[name], completed=done, total=total or None, facts=f"{size}  {facts}")
        if total and done == total:
            self._live.update(self._tasks[name], visible=False)

    def step(self, line: Mapping[str, Any]) -> None:
        """Show one finished step; `line` is its record in the metrics.

        The speed is the median since the last line: a step that gauges read, or that waited, is slower.
        """
        step = line["step"]
        if self.first_step is None:
            self.first_step, self.started = step, self.clock()
            self.last_step_line = self.started
        self._speeds.append(line["tokens_per_s"])
        facts = f"loss {line['loss']:.4f}  {median(self._speeds):,.0f} tokens/s"
        if "val_loss" in line:
            facts += f"  val loss {line['val_loss']:.4f}"
        if self.console.is_terminal:
            if "steps" not in self._tasks:
                self._tasks["steps"] = self._live.add_task("training", total=self.steps, facts="")
            so_far = f"{step}/{self.steps}  {facts}"
            self._live.update(self._tasks["steps"], completed=step, facts=so_far)
            if "val_loss" in line:
                self._speeds.clear()
                self.log(f"step {step:>6}/{self.steps}  {facts}")
            return
        now, is_due = self.clock(), step % self.every == 0 or step == self.steps or "val_loss" in line
        if is_due or now - self.last_step_line >= _LINE_EVERY_S:
            self._speeds.clear()
            self.last_step_line, left = now, "?"
            if done := step - self.first_step:  # at the average pace so far
                seconds = round((now - self.started) / done * (self.steps - step))
                left = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
            self.log(f"step {step:>6}/{self.steps}  {facts}  left {left}")
