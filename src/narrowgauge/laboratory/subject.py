"""A model on held-out text, as probes, sensitivities and searches measure it, and where results are kept."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from narrowgauge.analysis import Probed, open_probed
from narrowgauge.files import write_whole
from narrowgauge.formats import Format
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes import recipe

Progress = Callable[[str, int, int], None]


class TextKeys(TypedDict, total=False):
    """The keyword arguments of `Text`."""

    data: str | Path | None
    batches: int
    batch_size: int | None
    sequence_length: int | None
    device: str
    tokenizer: str | Path | None


FEW: TextKeys = {"batches": 4}  # of what takes many passes for each batch


@dataclass(frozen=True)
class Text:
    """The text and the device of a measurement: arguments of `probe`, `sensitivity` and `search`.

    Attributes:
        data: A text other than the run's.
        batches: Batches of held-out text, spread evenly over it.
        batch_size: Sequences of a batch; None for the run's micro-batch.
        sequence_length: Tokens of a sequence; None for the run's.
        device: "auto", "cpu" or "cuda".
        tokenizer: A tokenizer file in place of the model's.
    """

    data: str | Path | None = None
    batches: int = 8
    batch_size: int | None = None
    sequence_length: int | None = None
    device: str = "auto"
    tokenizer: str | Path | None = None

    def open(self, run: Path) -> Probed:
        """Open a run or a model of another program with this text (`analysis.open_probed`)."""
        return open_probed(
            *(run, self.device, None if self.tokenizer is None else Path(self.tokenizer)),
            *(None if self.data is None else str(self.data), self.batches),
            *(self.batch_size, self.sequence_length),
        )


def facts(probed: Probed) -> dict[str, int]:
    """The step of a subject, and the size of its text."""
    batches = probed.subject.batches
    tokens = sum(batch.targets for batch in batches)
    return {"step": probed.trained.step, "batches": len(batches), "tokens": tokens}


def heading(run: Path, probed: Probed) -> str:
    """The heading of a result: the model, and the text it was measured on."""
    found = facts(probed)
    return f"{run} after step {found['step']}, {found['tokens']:,} tokens in {found['batches']} batches"


def keep(run: Path, name: str, found: dict[str, Any]) -> None:
    """Store a result in a run directory, for the report; models of other programs are left unchanged."""
    if (run / "config.toml").is_file():
        write_whole(run / name, json.dumps(found, indent=1) + "\n")


def operand_cast(given: str | Format | Cast | dict[str, Any]) -> Cast:
    """A cast for an operand of a matmul, by name, format or table.

    Raises:
        UserError: there is no such cast, or it is for state.
    """
    cast = make_cast(given)  # without a place in its error message
    return recipe("fp32").with_places({"fprop.x": cast}).casts["fprop.x"]


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
