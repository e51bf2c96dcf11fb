"""One table of several runs: the same rows for the terminal and for the page.

A variant is a row: its loss, the gap to the reference, the interval of the gap, the verdict, and its cost.
The runs of a variant with several seeds follow it, and those of an experiment at several lengths the variants
at the lower rungs. Columns without any value are left out.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from narrowgauge.system.t_interval import Interval
from narrowgauge.system.units import human_bytes, human_count, percent_range, signed_percent
from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.report.verdict.verdict import Gap, Verdict, mean_of, verdicts

NOTHING, SEED = "-", "seed"
# Left-aligned columns; the others hold values.
TEXT_COLUMNS = ("run", "arm", "verdict", "recipe", "arithmetic", "status")


class Cell(str):
    """A text in a cell of a kind."""

    kind: str

    def __new__(cls, text: str, kind: str) -> "Cell":
        """The text, marked."""
        cell = super().__new__(cls, text)
        cell.kind = kind
        return cell


def kind_of(row: Mapping[str, str]) -> str:
    """`SEED` for one run of a variant that has several; else the number of the variant."""
    return str(getattr(row["run"], "kind", ""))


def table_rows(runs: Sequence[Run], found: Sequence[Verdict] = ()) -> list[dict[str, str]]:
    """The rows as texts by column, with equal columns in every row.

    A variant has the number of the first of its name (`kind_of`).

    Columns: run, seeds, loss (of the validation, if there is one), gap, 95 % interval for all variants at
    once, verdict, the gap by a bf16 forward pass, extra tokens, the other loss, tokens, tokens/s, memory,
    MFU, recipe, arithmetic, status. A star marks the speed of an emulated run, which does not predict that of
    native formats; such a run has no MFU.

    Args:
        runs: The runs, the reference first.
        found: The verdicts, of several rungs for a measured experiment; () for those on the runs.
    """
    found = found or verdicts(runs)
    names, rows = [one.name for one in found], list[dict[str, str]]()
    for at, one in enumerate(found):
        number, members = at if one.runs else names.index(one.name), list(one.runs.values())
        cells = {"gap": NOTHING if one.gap is None else signed_percent(one.gap)}
        if len(members) == 1:
            cells = {"gap": _gap(one.pair(members[0].seed))}
        cells["run"] = Cell(members[0].name if len(members) == 1 else one.name, str(number))
        cells |= _figures(members) if members else {"tokens": human_count(one.tokens)}
        cells |= _verdict_cells(one, found[0], cells) if len(found) > 1 else {"seeds": _count(one)}
        rows.append(cells)
        for seed, run in one.runs.items() if len(members) > 1 else ():
            cells = {"run": Cell(run.name, SEED), "seeds": f"seed {seed}"} | _figures([run])
            rows.append(cells | {"gap": _gap(one.pair(seed))})
    dull = _dull_columns(runs, rows)
    order = [column for column in _columns(found[0].by_validation) if column not in dull]
    kept = [column for column in order if any(row.get(column, NOTHING) != NOTHING for row in rows)]
    return [{column: row.get(column, NOTHING) for column in kept} for row in rows]


def _dull_columns(runs: Sequence[Run], rows: Sequence[dict[str, str]]) -> set[str]:
    """The columns that would repeat other columns or the sentences."""
    dull = set() if any(kind_of(row) == SEED for row in rows) or not runs else {"seeds"}
    if len(runs) == 1:
        return dull
    if all(kind_of(row) == SEED or row.get("recipe", NOTHING) in (NOTHING, row["run"]) for row in rows):
        dull.add("recipe")
    return dull | ({"tokens"} if len({row["tokens"] for row in rows}) == 1 else set())


def _columns(by_validation: bool) -> list[str]:
    first, second = ("val loss", "train loss") if by_validation else ("train loss", "val loss")
    judged = ["gap", "95 % interval", "verdict", "bf16 forward", "extra tokens"]
    rest = ["tokens", "tokens/s", "memory", "MFU", "recipe", "arithmetic", "status"]
    return ["run", "seeds", first, *judged, second, *rest]


def _figures(runs: Sequence[Run]) -> dict[str, str]:
    """The cells of a run, or of the runs of a variant: means over them, with their standard deviations."""
    tokens = sorted({run.tokens for run in runs if run.steps})
    mfus = [run.mfu for run in runs if run.mfu is not None and run.backend != "emulated"]
    memory, ended = mean_of(runs, "peak_memory_bytes"), sum(run.status == "done" for run in runs)
    done = "done" if ended == len(runs) else f"{ended} of {len(runs)} done"
    backends = " and ".join(dict.fromkeys(run.backend for run in runs if run.backend))
    at, steps = runs[0].final_validation, runs[0].steps
    is_early = len(runs) == 1 and at is not None and bool(steps) and at.step != steps[-1].step
    return {
        "val loss": mean_loss(runs, "final_val_loss") + (f" at step {at.step:,}" if is_early and at else ""),
        "train loss": mean_loss(runs, "final_train_loss"),
        "tokens": " to ".join(map(human_count, tokens[:: max(1, len(tokens) - 1)])) or NOTHING,
        "tokens/s": _speed(mean_of(runs, "tokens_per_s"), backends),
        "memory": NOTHING if memory is None else human_bytes(memory),
        "MFU": f"{100 * sum(mfus) / len(mfus):.1f} %" if mfus else NOTHING,
        "recipe": ", ".join(dict.fromkeys(run.recipe for run in runs)) or NOTHING,
        "arithmetic": backends or NOTHING,
        "status": runs[0].status if len(runs) == 1 else done,
    }


def mean_loss(runs: Sequence[Run], kind: str) -> str:
    """A last loss, or the mean over several runs; none if one failed, since the others are the lucky ones."""
    if len(runs) > 1 and any(run.has_failed for run in runs):
        return NOTHING
    found = [loss for run in runs if (loss := getattr(run, kind)) is not None]
    is_spread = len(found) > 1 and all(map(math.isfinite, found))
    spread = f" ± {statistics.stdev(found):.4f}" if is_spread else ""
    return format_loss(sum(found) / len(found) if found else None) + spread


def _verdict_cells(v: Verdict, reference: Verdict, figures: Mapping[str, str]) -> dict[str, str]:
    """The cells of a variant's verdict, and its ratios to the reference."""
    may_change = not (v.is_done or v.has_failed or v.is_reference)
    cells = {"seeds": _count(v), "verdict": v.conclusion + " (unfinished)" * may_change}
    if v.is_reference:
        return cells | {"gap": "reference"}
    extra = sum(v.extra) / len(v.extra) if v.extra else math.nan
    forward = sum(v.bf16_gaps) / len(v.bf16_gaps) if v.bf16_gaps else math.nan
    cells |= {"95 % interval": ends(v.at_once), "bf16 forward": percent(forward)}
    cells["extra tokens"] = percent(extra, 1)
    for name, figure in (("tokens/s", "tokens_per_s"), ("memory", "memory_bytes")):
        mine, base = getattr(v, figure), getattr(reference, figure)
        if mine is not None and base:
            cells[name] = f"{figures[name]} ({mine / base:.2f}x)"
    return cells


def _count(v: Verdict) -> str:
    """How many seeds a variant has."""
    return str(len(v.runs) or len(v.gaps)) + (f", {v.diverged} diverged" if v.diverged else "")


def format_loss(loss: float | None) -> str:
    """A loss with four decimals, "not finite", or "-" for None."""
    if loss is None:
        return NOTHING
    return f"{loss:.4f}" if math.isfinite(loss) else "not finite"


def _gap(gap: Gap | None) -> str:
    """The gap of a run to its partner, with the tokens of the comparison if a run continued."""
    if gap is None:
        return NOTHING
    text = signed_percent(gap.percent)
    return text if gap.is_final else f"{text} at {human_count(gap.tokens)}"


def percent(value: float, digits: int = 2) -> str:
    """A signed percentage, "-" for NaN.

    >>> percent(0.123), percent(-0.001), percent(float("nan"))
    ('+0.12 %', '0.00 %', '-')
    """
    return NOTHING if math.isnan(value) else signed_percent(value, digits)


def ends(interval: Interval) -> str:
    """Both ends of an interval in percent, "-" where they are not finite."""
    return percent_range(interval.low, interval.high) if math.isfinite(interval.low) else NOTHING


def _speed(tokens_per_s: float | None, backend: str) -> str:
    star = "*" if "emulated" in backend else ""
    return NOTHING if tokens_per_s is None else f"{human_count(tokens_per_s)}{star}"


def print_table(rows: Sequence[dict[str, str]], console: Console) -> None:
    """Print rows with the same keys; a narrow terminal gets the transposed table."""
    is_number = [column not in TEXT_COLUMNS for column in rows[0]]
    table = _table([list(rows[0])] + [list(row.values()) for row in rows], is_number)
    unbounded = console.options.update(max_width=10_000)
    if Measurement.get(console, unbounded, table).maximum > console.width:
        lines = [[column, *(row[column] for row in rows)] for column in rows[0]]
        table = _table(lines, [False, *(True for _ in rows)])
    console.print(table)


def _table(lines: Sequence[Sequence[str]], is_number: Sequence[bool]) -> Table:
    """A table with the first line as head; numeric columns are right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head, right in zip(lines[0], is_number, strict=True):
        table.add_column(escape(head), justify="right" if right else "left", overflow="fold")
    for line in lines[1:]:
        table.add_row(*map(escape, line))
    return table
