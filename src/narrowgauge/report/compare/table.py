"""A table of several runs: the same rows for the terminal and for the page.

The first run is the reference: `gap` is the excess of another run's loss over it, in percent. Losses fall
with every token, so they are compared at equal tokens, the last number at which both runs were measured; if
one run went further, the gap names that number. A column without any value is left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from narrowgauge.report.read.run import FINAL_STEPS, Run
from narrowgauge.units import human_bytes, human_count, signed_percent

NOTHING = "-"
TEXT_COLUMNS = ("run", "recipe", "arithmetic", "status")  # the other columns are numbers, set to the right


def comparison_rows(runs: Sequence[Run]) -> list[dict[str, str]]:
    """One row for each run: keys are the column heads in order, values are ready to print.

    Columns: run, recipe, arithmetic, tokens, train loss, val loss, gap, tokens/s, memory, MFU, status.
    A star marks speed and MFU of an emulated run, which do not predict those of native formats.
    """
    rows = [_row(run, runs[0]) for run in runs]
    kept = [column for column in rows[0] if column in TEXT_COLUMNS or any(r[column] != NOTHING for r in rows)]
    if len(runs) == 1:
        kept = [column for column in kept if column != "gap"]
    return [{column: row[column] for column in kept} for row in rows]


def comparison_notes(runs: Sequence[Run]) -> list[str]:
    """Notes that a reader of the rows needs, one sentence each."""
    notes = [f"Train loss is the mean over the last {FINAL_STEPS} steps; speed and MFU are medians over all."]
    if len(runs) > 1:
        basis = "train" if runs[0].final_val_loss is None else "validation"
        notes.append(
            f"Gap: {basis} loss in percent above (+) or below (-) {runs[0].name}'s, at equal tokens."
        )
    if len({run.tokens for run in runs}) > 1:
        notes.append(
            "The runs saw different numbers of tokens: their final losses do not compare, the gaps do."
        )
    if any(run.backend == "emulated" for run in runs):
        notes.append("* Emulated arithmetic: speed and MFU say nothing about the format's own in hardware.")
    notes += _peak_notes([run for run in runs if run.mfu is not None])
    for run in runs:
        if run.status in ("failed", "preempted") and run.reason:
            notes.append(f"{run.name} {run.status}: {run.reason}")
        if run.ignored_lines:
            lines = "line" if run.ignored_lines == 1 else "lines"
            notes.append(f"{run.name}: {run.ignored_lines} torn {lines} of metrics.jsonl left out.")
    return notes


def _peak_notes(runs: Sequence[Run]) -> list[str]:
    """Notes on the peak that an MFU refers to; with the names of the runs if the peaks differ."""
    names_by_peak: dict[str, list[str]] = {}
    for run in runs:
        names_by_peak.setdefault(run.peak_source or "a peak the run did not name", []).append(run.name)
    if len(names_by_peak) == 1:
        return [f"MFU is a share of {next(iter(names_by_peak))}."]
    return [f"MFU of {', '.join(names)}: a share of {peak}." for peak, names in names_by_peak.items()]


def print_comparison(runs: Sequence[Run], console: Console) -> None:
    """Print the rows as a table with notes beneath."""
    print_rows(comparison_rows(runs), comparison_notes(runs), console, numbers_from=3)


def print_rows(
    rows: Sequence[Mapping[str, str]], notes: Sequence[str], console: Console, numbers_from: int
) -> None:
    """Print rows of equal keys as a table with notes beneath; a narrow terminal gets the transposed table."""
    table = _table([list(rows[0])] + [list(row.values()) for row in rows], numbers_from)
    unbounded = console.options.update(max_width=10_000)
    if Measurement.get(console, unbounded, table).maximum > console.width:
        table = _table([[column, *(row[column] for row in rows)] for column in rows[0]], numbers_from=1)
    console.print(table)
    for note in notes:
        console.print(note, style="dim", markup=False, highlight=False)


def _table(lines: Sequence[Sequence[str]], numbers_from: int) -> Table:
    """A table with the first line as head; columns from `numbers_from` on are right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, head in enumerate(lines[0]):
        table.add_column(escape(head), justify="right" if number >= numbers_from else "left", overflow="fold")
    for line in lines[1:]:
        table.add_row(*map(escape, line))
    return table


@dataclass(frozen=True)
class Gap:
    """The excess of a loss over another, the tokens of the comparison, and whether both runs end there."""

    percent: float
    tokens: int
    final: bool


def gap_to(run: Run, first: Run) -> Gap | None:
    """The gap of `run` to `first` at the last equal number of tokens; None if no number is equal.

    It compares validation losses if `first` has any, else means of the last 10 train losses at equal tokens.
    """
    if first.validation:
        window, losses, reference = 1, _val_by_tokens(run), _val_by_tokens(first)
    else:
        window, losses, reference = FINAL_STEPS, _train_by_tokens(run), _train_by_tokens(first)
    equal = [tokens for tokens in losses if tokens in reference][-window:]
    base = sum(reference[tokens] for tokens in equal)
    if not base:
        return None
    excess = sum(losses[tokens] for tokens in equal) - base
    return Gap(100 * excess / base, equal[-1], final=equal[-1] == max(losses) == max(reference))


def _val_by_tokens(run: Run) -> dict[int, float]:
    """Validation loss by tokens seen, without the one before training, which all runs share."""
    return {at.tokens: at.val_loss for at in run.validation if at.tokens > 0}


def _train_by_tokens(run: Run) -> dict[int, float]:
    return {at.tokens: at.loss for at in run.steps}


def format_loss(loss: float | None) -> str:
    """A loss with four decimals, "not finite", or "-" for None."""
    if loss is None:
        return NOTHING
    return f"{loss:.4f}" if math.isfinite(loss) else "not finite"


def format_gap(gap: Gap | None) -> str:
    """A signed percentage, with the tokens of the comparison if a run went further; "-" for None."""
    if gap is None:
        return NOTHING
    percent = signed_percent(gap.percent)
    return percent if gap.final else f"{percent} at {human_count(gap.tokens)}"


def _row(run: Run, first: Run) -> dict[str, str]:
    star = "*" if run.backend == "emulated" else ""
    speed, memory, mfu = run.tokens_per_s, run.peak_memory_bytes, run.mfu
    return {
        "run": run.name,
        "recipe": run.recipe or NOTHING,
        "arithmetic": run.backend or NOTHING,
        "tokens": human_count(run.tokens) if run.steps else NOTHING,
        "train loss": format_loss(run.final_train_loss),
        "val loss": format_loss(run.final_val_loss),
        "gap": "reference" if run is first else format_gap(gap_to(run, first)),
        "tokens/s": NOTHING if speed is None else f"{human_count(speed)}{star}",
        "memory": NOTHING if memory is None else human_bytes(memory),
        "MFU": NOTHING if mfu is None else f"{100 * mfu:.1f} %{star}",
        "status": run.status,
    }
