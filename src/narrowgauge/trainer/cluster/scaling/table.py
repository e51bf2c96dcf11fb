"""Prints the measured scaling: a table for each mode, bandwidths, the verdict, warnings."""

from functools import partial

from rich.console import Console
from rich.table import Table

from narrowgauge.system.units import human_bytes, human_count
from narrowgauge.trainer.cluster.scaling.scaling import Scaling
from narrowgauge.trainer.cluster.scaling.statistics import Row

_TITLES = {
    "strong": "strong: the same batch in all",
    "weak": "weak: the same batch for each process",
}


def print_scaling(result: Scaling, console: Console) -> None:
    """Print the figures, the verdict and the warnings."""
    f, say = result.facts, partial(console.print, highlight=False, markup=False)
    star = "*" if f["backend"] == "emulated" else ""
    say(
        f"{f['model']}, {f['parameters']:,} parameters, recipe {f['recipe']} ({f['backend']}), "
        f"sequences of {f['sequence_length']} tokens, {f['device']}"
    )
    for mode, title in _TITLES.items():
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        rows = [_cells(row, star) for row in result.rows if row.mode == mode]
        for column in rows[0]:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row.values())
        say(f"\n{title}", style="bold")
        say(table)
    say("", *_notes(result), sep="\n")
    say(result.verdict, style="bold")
    for warning in result.warnings:
        say(f"WARNING {warning}", style="yellow")


def _cells(row: Row, star: str) -> dict[str, str]:
    """The cells of a row by column."""
    low, high = min(row.round_ms), max(row.round_ms)
    batch = f"{row.batch_size // row.micro_batch_size} x {row.micro_batch_size}"
    return {
        "procs": str(row.processes),
        "batch": batch,
        "step, ms": _ms(row.step_ms),
        "rounds": f"{_ms(low)}-{_ms(high)}",
        "tokens/s": f"{human_count(row.tokens_per_s)}{star}",
        "speed-up": f"{row.speed_up:.2f}x",
        "efficiency": f"{row.efficiency:.0%}",
        "communication": f"{row.communication:.0%}",
    }


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1}f}"


def _notes(result: Scaling) -> list[str]:
    notes = [
        "batch: micro-batches of all processes x sequences of each; communication: the share of a step in "
        "which a process waits for the others, excluding what overlaps with computation",
        result.compared,
    ]
    if result.facts["backend"] == "emulated":
        notes.append("* emulated arithmetic: not the speed of the format in hardware")
    for one in result.all_reduce:
        notes.append(
            f"all-reduce of {human_bytes(one['bytes'])} over {one['processes']:.0f} processes: "
            f"{one['ms']:.1f} ms, "
            f"{one['algorithm_bandwidth'] / 1e9:.2f} GB/s (bus {one['bus_bandwidth'] / 1e9:.2f} GB/s)"
        )
    weak = [row for row in result.rows if row.mode == "weak"]
    return [*notes, *(_break_even(row, weak[0]) for row in weak[1:])]


def _break_even(row: Row, fewest: Row) -> str:
    what = f"{row.processes} processes become faster than {fewest.processes}"
    if row.break_even_tokens is None:
        return f"estimate: {what} at no batch"
    if row.break_even_tokens < 1:
        return f"estimate: {what} at any batch"
    return f"estimate: {what} from about {human_count(row.break_even_tokens)} tokens a process and step on"
