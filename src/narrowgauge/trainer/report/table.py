"""Several runs in one table, in a few sentences, and in notes: the same on the terminal and the page.

A variant is a row: its loss, the gap to the reference, the interval of the gap, the verdict, and its cost.
The runs of a variant with several seeds follow it, and those of an experiment at several lengths the variants
at the lower rungs. Columns without any value are left out.

Of the sentences failures come first, then what the seeds show, then what they leave open. Nothing is called
lower or better unless its interval excludes zero: the order of losses of single seeds is mostly luck.
"""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from narrowgauge.system.t_interval import CONFIDENCE, Interval
from narrowgauge.system.units import human_bytes, human_count, percent_range, signed_percent
from narrowgauge.trainer.report.read.records import warmup_spikes
from narrowgauge.trainer.report.read.run import ENDED, FINAL_STEPS, Run
from narrowgauge.trainer.report.verdict.rule import MARGIN, Judgement
from narrowgauge.trainer.report.verdict.verdict import (
    Gap,
    Verdict,
    known_of,
    mean_of,
    sampling_error,
    verdicts,
)

NOTHING, SEED = "-", "seed"
# Left-aligned columns; the others hold values.
TEXT_COLUMNS = ("run", "arm", "verdict", "recipe", "arithmetic", "status")
MOST = 4  # names in one sentence
_CLASS = re.compile(r"^[A-Z][A-Za-z]+: ")  # the error class that a status begins with


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
        cells = {"gap": percent(math.nan if one.gap is None else one.gap)}
        if len(members) == 1:
            cells = {"gap": _gap_of_run(one.pair(members[0].seed))}
        cells["run"] = Cell(members[0].name if len(members) == 1 else one.name, str(number))
        cells |= _figures(members) if members else {"tokens": human_count(one.tokens)}
        cells |= _verdict_cells(one, found[0], cells) if len(found) > 1 else {"seeds": _seeds(one)}
        rows.append(cells)
        for seed, run in one.runs.items() if len(members) > 1 else ():
            cells = {"run": Cell(run.name, SEED), "seeds": f"seed {seed}"} | _figures([run])
            rows.append(cells | {"gap": _gap_of_run(one.pair(seed))})
    losses = ["val loss", "train loss"]
    first, second = losses if found[0].by_validation else losses[::-1]
    columns = ["run", "seeds", first, "gap", "95 % interval", "verdict", "bf16 forward", "extra tokens"]
    columns += [second, "tokens", "tokens/s", "memory", "MFU", "recipe", "arithmetic", "status"]
    dull = _dull_columns(runs, rows)
    kept = [c for c in columns if c not in dull and any(row.get(c, NOTHING) != NOTHING for row in rows)]
    return [{column: row.get(column, NOTHING) for column in kept} for row in rows]


def _dull_columns(runs: Sequence[Run], rows: Sequence[dict[str, str]]) -> set[str]:
    """The columns that would repeat other columns or the sentences."""
    dull = set() if any(kind_of(row) == SEED for row in rows) or not runs else {"seeds"}
    if len(runs) == 1:
        return dull
    if all(kind_of(row) == SEED or row.get("recipe", NOTHING) in (NOTHING, row["run"]) for row in rows):
        dull.add("recipe")
    return dull | ({"tokens"} if len({row["tokens"] for row in rows}) == 1 else set())


def _figures(runs: Sequence[Run]) -> dict[str, str]:
    """The cells of a run, or of the runs of a variant: means over them, with their standard deviations."""
    tokens = sorted({run.tokens for run in runs if run.steps})
    mfus = [run.mfu for run in runs if run.mfu is not None and run.backend != "emulated"]
    memory, speed = (mean_of(runs, figure) for figure in ("peak_memory_bytes", "tokens_per_s"))
    ended = sum(run.status == "done" for run in runs)
    done = "done" if ended == len(runs) else f"{ended} of {len(runs)} done"
    backends = " and ".join(dict.fromkeys(run.backend for run in runs if run.backend))
    star = "*" if "emulated" in backends else ""
    at, steps = runs[0].final_validation, runs[0].steps
    is_early = len(runs) == 1 and at is not None and bool(steps) and at.step != steps[-1].step
    return {
        "val loss": _mean_loss(runs, "final_val_loss") + (f" at step {at.step:,}" if is_early and at else ""),
        "train loss": _mean_loss(runs, "final_train_loss"),
        "tokens": " to ".join(map(human_count, tokens[:: max(1, len(tokens) - 1)])) or NOTHING,
        "tokens/s": NOTHING if speed is None else human_count(speed) + star,
        "memory": NOTHING if memory is None else human_bytes(memory),
        "MFU": f"{100 * sum(mfus) / len(mfus):.1f} %" if mfus else NOTHING,
        "recipe": ", ".join(dict.fromkeys(run.recipe for run in runs)) or NOTHING,
        "arithmetic": backends or NOTHING,
        "status": runs[0].status if len(runs) == 1 else done,
    }


def _mean_loss(runs: Sequence[Run], kind: str) -> str:
    """A last loss, or the mean over several runs; none if one failed, since the others are the lucky ones."""
    if len(runs) > 1 and any(run.has_failed for run in runs):
        return NOTHING
    found = [loss for run in runs if (loss := getattr(run, kind)) is not None]
    is_spread = len(found) > 1 and all(map(math.isfinite, found))
    spread = f" ± {statistics.stdev(found):.4f}" if is_spread else ""
    return _loss(sum(found) / len(found) if found else None) + spread


def _loss(loss: float | None) -> str:
    if loss is None:
        return NOTHING
    return f"{loss:.4f}" if math.isfinite(loss) else "not finite"


def _verdict_cells(v: Verdict, reference: Verdict, figures: Mapping[str, str]) -> dict[str, str]:
    """The cells of a variant's verdict, and its ratios to the reference."""
    may_change = not (v.is_done or v.has_failed or v.is_reference)
    cells = {"seeds": _seeds(v), "verdict": v.conclusion + " (unfinished)" * may_change}
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


def _seeds(v: Verdict) -> str:
    """How many seeds a variant has."""
    return str(len(v.runs) or len(v.gaps)) + (f", {v.diverged} diverged" if v.diverged else "")


def _gap_of_run(gap: Gap | None) -> str:
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


def print_comparison(runs: Sequence[Run], console: Console, found: Sequence[Verdict] = ()) -> None:
    """Print the table with notes below, and for several runs the verdict in words.

    A variant with several seeds is one row; the page also has a row for each seed.
    """
    if runs or found:
        _print_table([row for row in table_rows(runs, found) if kind_of(row) != SEED], console)
    for note in table_notes(runs, found) if runs else ():
        console.print(note, style="dim", markup=False, highlight=False)
    if len(runs) > 1 or any(run.status != "done" for run in runs):
        console.print("\n" + " ".join(summary(runs, found)), style="bold", markup=False, highlight=False)


def _print_table(rows: Sequence[dict[str, str]], console: Console) -> None:
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


def summary(runs: Sequence[Run], found: Sequence[Verdict] = ()) -> list[str]:
    """The result of one run, or the verdict on several, at the highest rung, in sentences."""
    failed = [run for run in runs if run.has_failed]
    sentences = []
    for run in failed[:MOST]:
        who = "The run" if len(runs) == 1 else run.name
        why = _reason(run).rstrip(".") or "it left no reason"
        sentences.append(f"{who} failed after {_reached(run)}: {why}.")
    if len(failed) > MOST:
        sentences.append(f"{len(failed) - MOST} more runs failed.")
    if len(runs) == 1:
        return sentences + _of_one(runs[0])
    found = found or verdicts(runs)
    sentences += _of_many([one for one in found if one.rung == found[0].rung])
    left = [run.name for run in runs if run.status not in ENDED]
    return sentences + ([f"Not finished: {listed(left)}."] if left else [])


def _reason(run: Run) -> str:
    """Why a run failed or was stopped, without the name of the error's class; "" if unknown."""
    return _CLASS.sub("", run.reason)


def _reached(run: Run) -> str:
    """How far a run got: "step 12 of 40"."""
    step = run.steps[-1].step if run.steps else 0
    return f"step {step:,}" + (f" of {run.planned_steps:,}" if run.planned_steps else "")


def _of_one(run: Run) -> list[str]:
    arithmetic = f" in {run.backend} arithmetic" if run.backend else ""
    recipe = f"Recipe {run.recipe}{arithmetic}" if run.recipe else "This run"
    if not run.steps:
        return [f"{recipe}: no step has been recorded yet (status: {run.status})."]
    if run.has_failed:
        return [f"{recipe}: {_last_loss(run)}."]
    name, loss, where, at = "train", run.final_train_loss, "", run.final_validation
    if at is not None:
        name, loss = "validation", at.val_loss
        where = "" if at.step == run.steps[-1].step else f", measured at step {at.step:,}"
    reached = f"{_count(run.steps[-1].step, 'step')} and {human_count(run.tokens)} tokens"
    sentences = [f"{recipe}: {name} loss {_loss(loss)} after {reached}{where}."]
    if run.status == "preempted":
        sentences.append(f"It was stopped after {_reached(run)} ({_reason(run) or 'no reason left'}).")
    elif run.status == "killed":
        sentences.append(f"It was killed after {_reached(run)}: {run.reason}.")
    elif run.status != "done":
        sentences.append(f"It is not finished: {_reached(run)} (status: {run.status}).")
    return [*sentences, "One seed: another would end a little higher or lower."]


def _last_loss(run: Run) -> str:
    """The last losses of a failed run that are worth reporting."""
    finite = [step for step in run.steps if math.isfinite(step.loss)]
    found = []
    if finite:
        found.append(f"the last finite train loss is {finite[-1].loss:.4f}, of step {finite[-1].step:,}")
    if (at := run.final_validation) is not None and math.isfinite(at.val_loss):
        found.append(f"the last validation loss is {at.val_loss:.4f}, after step {at.step:,}")
    return "; ".join(found) or "no loss was finite"


def _of_many(found: Sequence[Verdict]) -> list[str]:
    """The verdicts: proven differences, then what is not proven, then what cannot be compared."""
    reference, others = found[0], [v for v in found[1:] if not v.has_failed]
    loss = "validation loss" if reference.by_validation else "train loss"
    if len(found) == 1:
        mean = _mean_loss(list(reference.runs.values()), reference.kind)
        return [f"{reference.name}: {loss} {mean}, {_count(len(reference.runs), 'seed')}."]

    to, proven = reference.name, [v for v in others if v.is_proven]
    sentences = []
    for v in proven[:MOST]:
        word, _, equal = v.conclusion.partition(", ")
        but = f", but {equal}" if equal else ""
        sentences.append(f"{v.name} ends {word} than {to}{but}: {_gap(v)} {loss} ({_interval(v)}).")
    if len(proven) > MOST:
        sentences.append(f"Proven differences from {to}, besides: {len(proven) - MOST} more.")
    for words, begin, what in (
        (("no difference seen",), f"No difference from {to} is proven for", _measured),
        ((f"equal within {MARGIN} %",), f"Equal to {to} within {MARGIN} %:", _measured),
        (("equal",), f"Equal to {to} in every seed:", lambda v: _count(len(v.gaps), "seed")),
        (("not finite", "nothing to compare"), f"Not compared with {to}:", partial(_why_not, reference)),
        (("open",), f"Open: one seed proves no difference. The gaps in {loss} to {to}:", _gap),
    ):
        if these := [v for v in others if v.conclusion in words]:
            sentences.append(f"{begin} {_names(these, what)}.")
    return sentences or [f"Nothing can be compared with {to}."]


def _why_not(reference: Verdict, v: Verdict) -> str:
    """Why a variant cannot be compared."""
    to = reference.name
    if not all(map(math.isfinite, v.losses)):
        return "its loss is NaN or infinite"
    if reference.has_failed:
        return f"a run of {to} failed"
    if not all(map(math.isfinite, reference.losses)):
        return f"{to}'s loss is NaN or infinite"
    if not (v.is_done and reference.is_done):
        return "one of the two has not come far enough"
    return f"{to} lacks its seeds or tokens"


def _gap(v: Verdict) -> str:
    return "" if v.gap is None else signed_percent(v.gap)


def _interval(v: Verdict) -> str:
    return f"{100 * CONFIDENCE:.0f} % interval {ends(v.at_once)}, {_count(len(v.gaps), 'seed')}"


def _measured(v: Verdict) -> str:
    return f"{_gap(v)}, {_interval(v)}"


def _names(found: Sequence[Verdict], what: Callable[[Verdict], str]) -> str:
    """Names, each with a remark; if there are many, those with the widest gaps."""
    shown = sorted(found, key=lambda v: -abs(v.gap or 0.0)) if len(found) > MOST else found
    return listed([f"{v.name} ({words})" if (words := what(v)) else v.name for v in shown])


def listed(texts: Sequence[str], most: int = MOST) -> str:
    """The first few of some texts, and how many more there are."""
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return ", ".join([*texts[:most], *more])


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' * (number != 1)}"


def table_notes(runs: Sequence[Run], found: Sequence[Verdict] = ()) -> list[str]:
    """The notes needed to read the rows."""
    found = found or verdicts(runs)
    notes = _gap_notes(runs, found) if len(found) > 1 else []
    if any(run.steps for run in runs):
        notes.append(f"Train loss: mean over the last {FINAL_STEPS} steps; speed, MFU: medians over the run.")
    if any(run.backend == "emulated" for run in runs):
        notes.append("* Emulated arithmetic: not the speed of the format in hardware.")
    if len(runs) > 1 and any(str(run.facts.get("device") or "").startswith("CPU") for run in runs):
        notes.append("Speeds of several runs on one CPU compare roughly; narrowgauge bench measures better.")
    notes += _warmup_note(runs)
    by_peak: dict[str, list[str]] = {}
    for run in runs:
        if run.mfu is not None and run.backend != "emulated":
            peak = str(run.facts.get("peak_source") or "a peak the run did not name")
            by_peak.setdefault(peak, []).append(run.name)
    if len(by_peak) > 1:
        peaks = "; ".join(f"{peak} ({', '.join(names)})" for peak, names in by_peak.items())
        notes.append(f"MFU does not compare here, since the runs have different yardsticks: {peaks}.")
    else:
        notes += [f"MFU is a share of {peak}." for peak in by_peak]
    for run in runs:
        if run.status == "preempted" and len(runs) > 1:
            notes.append(f"{run.name} was stopped: {_reason(run) or 'it left no reason'}")
        if run.ignored_lines:
            lines = _count(run.ignored_lines, "torn line")
            notes.append(f"{run.name}: {lines} of metrics.jsonl left out.")
    return notes


def _warmup_note(runs: Sequence[Run]) -> list[str]:
    """A warning of warm-ups with spikes, in which a small change grows into another run."""
    found = {run.name: max(ratios) for run in runs if (ratios := warmup_spikes(run.steps))}
    if not found:
        return []
    text = (
        f"The gradient norm spikes in the warm-up of {listed(list(found), 3)}, up to "
        f"{max(found.values()):.0f} times the median before it: two runs of one seed part there"
    )
    if len(runs) > 1:
        deviation = f"{known:.2g} %" if (known := known_of(runs)) else "0.5 to 0.9 %"
        text += f". This comparison begins in chaos: pairs deviate by about {deviation} whatever the format"
    return [f"{text}. A longer warm-up, a lower rate, or model.initial_std = 0 avoids it."]


def _gap_notes(runs: Sequence[Run], found: Sequence[Verdict]) -> list[str]:
    """Notes on gaps, intervals and seeds."""
    reference, *others = found
    loss = "validation" if reference.by_validation else "train"
    notes = [
        f"Gap: {loss} loss in percent above (+) or below (-) that of {reference.name} with the same seed, at "
        "equal tokens."
    ]
    judged = [v.judgement for v in others if v.judgement is not None and v.half_width is not None]
    if judged:
        notes.append("Of several seeds: mean, ± their standard deviation; " + _interval_note(judged))
    notes += [
        f"{v.name} is a control: judged alone, and not counted among the variants."
        for v in others
        if v.is_control and v.rung == reference.rung
    ]
    if any(v.gap is not None and v.half_width is None for v in others):
        notes.append(
            "A gap of one seed has no confidence interval: another seed would give another gap. "
            "--seeds 3 or more continues from these runs."
        )
    notes += _held_out_note(runs, found, judged)
    for v in others:
        unpaired = sorted(set(v.runs) - set(v.gaps))
        if unpaired and not v.has_failed and not reference.has_failed:
            seeds, one = ", ".join(map(str, unpaired)), len(unpaired) == 1
            notes.append(
                f"{v.name}: seed{'s' * (not one)} {seeds} {'has' if one else 'have'} no equal tokens in "
                f"{reference.name}, and {'is' if one else 'are'} left out."
            )
    tokens = {run.tokens for run in runs}
    planned = sorted({run.planned_steps for run in runs if run.planned_steps is not None})
    if len(tokens) == 1:
        notes.append(f"Each run saw {human_count(*tokens)} tokens.")
    else:
        also = "the gaps do."
        if len(planned) > 1:
            lengths = ", ".join(f"{steps:,}" for steps in planned)
            also = "and a gap compares only where both had the same learning rates until then: the runs were "
            also += f"planned for {lengths} steps."
        notes.append(f"The runs saw different numbers of tokens: their final losses do not compare, {also}")
    if len({str(run.facts["corpus"]) for run in runs if run.facts.get("corpus")}) > 1:  # text and tokenizer
        notes.append(
            "The runs differ in their text or tokenizer: their losses are of other tokens, and no gap counts."
        )
    return notes


def _interval_note(judged: Sequence[Judgement]) -> str:
    """What the intervals cover, and the deviation that they are based on."""
    family = max(one.family for one in judged)
    at_once = f", for {family} variants at once" if family > 1 else ""
    deviations = sorted({one.spread.deviation for one in judged if one.spread is not None and one.half_width})
    raised = any(one.spread is not None and one.spread.is_raised for one in judged)
    text = f"interval: {CONFIDENCE:.0%}{at_once}"
    if deviations:
        span = " to ".join(f"{x:.2g}" for x in deviations[:: max(1, len(deviations) - 1)])
        text += f", if gaps of seeds deviate by {span} %"
        text += ", raised towards what is known of such lengths" if raised else ""
    return f"{text}."


def _held_out_note(runs: Sequence[Run], found: Sequence[Verdict], judged: Sequence[Judgement]) -> list[str]:
    """How far the held-out tokens move gaps, if that is most of what seeds deviate or no seeds tell."""
    last = runs[0].final_validation
    if not (error := sampling_error(found)) or last is None:
        return []
    deviations = [one.spread.deviation for one in judged if one.spread is not None]
    if deviations and error**2 < min(deviations) ** 2 / 2:
        return []
    share = ", most of what seeds deviate" if deviations else ""
    text = f"The {last.held_out:,} held-out tokens alone make a gap deviate by {error:.2g} %{share}"
    batches = runs[0].setting("validation", "batches")
    how = f" (--validation.batches {4 * batches}, or [experiment] held_out_tokens)" if batches else ""
    return [f"{text}; four times as many{how} halve that."]
