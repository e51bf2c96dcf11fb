"""The progress of a measurement: bars on a terminal, lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from narrowgauge.trainer.laboratory.arguments import Progress


@contextmanager
def progress(console: Console, name: str) -> Iterator[Progress]:
    """A progress bar on a terminal; elsewhere a line when a recipe begins."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn(compact=True))
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {}

        def show(recipe: str, done: int, total: int) -> None:
            if recipe not in tasks:
                tasks[recipe] = bars.add_task(f"{name} {recipe}", total=total)
                if not console.is_terminal:
                    console.print(f"{name} {recipe} ...", highlight=False, markup=False)
            bars.update(tasks[recipe], completed=done)

        yield show
