"""One table of several runs: the same rows for the terminal and for the page.

A variant is a row: its loss, the gap to the reference, the interval of the gap, the verdict, and its cost.
The runs of a variant with several seeds follow it. Columns without any value are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.system.units import human_bytes, human_count, percent_range, signed_percent
from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.report.verdict.gap import NOTHING, format_gap, format_loss, gap_to
from narrowgauge.trainer.report.verdict.groups import groups, references
from narrowgauge.trainer.report.verdict.verdict import Verdict, has_validation, verdicts

# Left-aligned columns; the others hold values.
TEXT_COLUMNS = ("run", "arm", "verdict", "recipe", "arithmetic", "status")


@dataclass(frozen=True)
class Row:
    """A line of the table: texts by column, and the variant's number in the order of the table."""

    cells: dict[str, str]
    variant: int
    is_seed: bool = False  # one run of a variant that has several


def table_rows(runs: Sequence[Run]) -> list[Row]:
    """The rows, with equal columns in every row.

    Columns: run, seeds, loss (of the validation, if there is one), gap, 95 % interval, verdict, the other
    loss, tokens, tokens/s, memory, MFU, recipe, arithmetic, status. A star marks the speed of an emulated
    run, which does not predict that of native formats; such a run has no MFU.
    """
    all_groups = groups(runs)
    by_validation, partners = has_validation(runs), references(all_groups)
    is_compared = len(all_groups) > 1
    rows = []
    for number, (group, verdict) in enumerate(zip(all_groups, verdicts(runs), strict=True)):
        members = list(group.runs.values())
        if len(members) == 1:
            cells = _run_cells(members[0], partners.get(id(members[0])), by_validation)
            rows.append(Row(cells | _verdict_cells(verdict, is_compared), number))
            continue
        mean = group.mean(lambda run: run.final_train_loss)
        cells = _variant_cells(verdict, members, by_validation, mean)
        rows.append(Row(cells | _verdict_cells(verdict, is_compared) | {"seeds": str(len(members))}, number))
        for seed, run in group.runs.items():
            cells = _run_cells(run, partners.get(id(run)), by_validation) | {"seeds": f"seed {seed}"}
            rows.append(Row(cells, number, is_seed=True))
    dull = _dull_columns(runs, rows)
    order = [column for column in _columns(by_validation) if column not in dull]
    kept = [column for column in order if any(row.cells.get(column, NOTHING) != NOTHING for row in rows)]
    return [
        Row({column: row.cells.get(column, NOTHING) for column in kept}, row.variant, row.is_seed)
        for row in rows
    ]


def _dull_columns(runs: Sequence[Run], rows: Sequence[Row]) -> set[str]:
    """The columns that would repeat other columns or the sentences."""
    dull = set() if any(row.is_seed for row in rows) else {"seeds"}
    if len(runs) == 1:
        return dull
    if all(row.is_seed or row.cells["recipe"] in (NOTHING, row.cells["run"]) for row in rows):
        dull.add("recipe")
    return dull | ({"tokens"} if len({run.tokens for run in runs}) == 1 else set())


def _columns(by_validation: bool) -> list[str]:
    first, second = ("val loss", "train loss") if by_validation else ("train loss", "val loss")
    rest = ["tokens", "tokens/s", "memory", "MFU", "recipe", "arithmetic", "status"]
    return ["run", "seeds", first, "gap", "95 % interval", "verdict", second, *rest]


def _run_cells(run: Run, partner: Run | None, by_validation: bool) -> dict[str, str]:
    """The cells of one run; `partner` is the reference's run with its seed."""
    at, mfu = run.final_validation, run.mfu
    is_last = at is None or not run.steps or at.step == run.steps[-1].step
    validation = format_loss(run.final_val_loss) + ("" if is_last or at is None else f" at step {at.step:,}")
    return {
        "run": run.name,
        "val loss": validation,
        "train loss": format_loss(run.final_train_loss),
        "gap": NOTHING if partner is None else format_gap(gap_to(run, partner, by_validation)),
        "tokens": human_count(run.tokens) if run.steps else NOTHING,
        "tokens/s": _speed(run.tokens_per_s, run.backend),
        "memory": NOTHING if run.peak_memory_bytes is None else human_bytes(run.peak_memory_bytes),
        "MFU": NOTHING if mfu is None or run.backend == "emulated" else f"{100 * mfu:.1f} %",
        "recipe": run.recipe or NOTHING,
        "arithmetic": run.backend or NOTHING,
        "status": run.status,
    }


def _verdict_cells(v: Verdict, is_compared: bool) -> dict[str, str]:
    """The cells of a variant's verdict, and its ratios to the reference."""
    if not is_compared:
        return {}
    cells = {"seeds": str(len(v.seeds)), "verdict": verdict_text(v)}
    if v.is_reference:
        cells["gap"] = "reference"
    else:
        cells["95 % interval"] = _interval(v)
        if v.speed is not None:
            cells["tokens/s"] = f"{_speed(v.tokens_per_s, v.arithmetic)} ({v.speed:.2f}x)"
        if v.memory is not None and v.memory_bytes is not None:
            cells["memory"] = f"{human_bytes(v.memory_bytes)} ({v.memory:.2f}x)"
    return cells


def _variant_cells(
    v: Verdict, members: Sequence[Run], by_validation: bool, train: float | None
) -> dict[str, str]:
    """The cells of a variant with several seeds: means over them."""
    spread = "" if v.loss_deviation is None else f" ± {v.loss_deviation:.4f}"
    loss = f"{format_loss(v.loss)}{spread}"
    mfus = [run.mfu for run in members if run.mfu is not None and run.backend != "emulated"]
    tokens = sorted({run.tokens for run in members})
    done = sum(run.status == "done" for run in members)
    return {
        "run": v.name,
        "val loss": loss if by_validation else NOTHING,
        "train loss": loss if not by_validation else NOTHING if v.has_failed else format_loss(train),
        "gap": NOTHING if v.gap is None or v.is_reference else signed_percent(v.gap),
        "tokens": " to ".join(map(human_count, tokens[:: max(1, len(tokens) - 1)])),
        "tokens/s": _speed(v.tokens_per_s, v.arithmetic),
        "memory": NOTHING if v.memory_bytes is None else human_bytes(v.memory_bytes),
        "MFU": f"{100 * sum(mfus) / len(mfus):.1f} %" if mfus else NOTHING,
        "recipe": ", ".join(dict.fromkeys(run.recipe for run in members)) or NOTHING,
        "arithmetic": v.arithmetic or NOTHING,
        "status": "done" if done == len(members) else f"{done} of {len(members)} done",
    }


def verdict_text(v: Verdict) -> str:
    """The readable verdict, marked if it may still change."""
    return v.conclusion + ("" if v.is_done or v.has_failed or v.is_reference else " (unfinished)")


def _speed(tokens_per_s: float | None, backend: str) -> str:
    star = "*" if "emulated" in backend else ""
    return NOTHING if tokens_per_s is None else f"{human_count(tokens_per_s)}{star}"


def _interval(v: Verdict) -> str:
    if v.gap is None or v.half_width is None:
        return NOTHING
    if not (abs(v.gap) < float("inf") and abs(v.half_width) < float("inf")):
        return NOTHING
    return percent_range(v.gap - v.half_width, v.gap + v.half_width)
