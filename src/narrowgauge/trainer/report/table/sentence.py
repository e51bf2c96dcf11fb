"""The result of some runs in a few sentences, with its basis; and the notes below their table.

Failures come first, then what the seeds show, then what they leave open. Nothing is called lower or better
unless its interval excludes zero: the order of losses of single seeds is mostly luck.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console

from narrowgauge.system.t_interval import CONFIDENCE
from narrowgauge.system.units import human_count, signed_percent
from narrowgauge.trainer.report.read.records import warmup_spikes
from narrowgauge.trainer.report.read.run import ENDED, FINAL_STEPS, Run
from narrowgauge.trainer.report.table.table import (
    SEED,
    ends,
    format_loss,
    kind_of,
    mean_loss,
    print_table,
    table_rows,
)
from narrowgauge.trainer.report.verdict.rule import MARGIN, Judgement
from narrowgauge.trainer.report.verdict.verdict import Verdict, known_of, sampling_error, verdicts

MOST = 4  # names in one sentence
_CLASS = re.compile(r"^[A-Z][A-Za-z]+: ")  # the error class that a status begins with


def summary(runs: Sequence[Run], found: Sequence[Verdict] = ()) -> list[str]:
    """The result of one run, or the verdict on several, at the highest rung, in sentences."""
    if len(runs) == 1:
        return _failures(runs) + _of_one(runs[0])
    found = found or verdicts(runs)
    top = [one for one in found if one.rung == found[0].rung]
    return _failures(runs) + _of_many(top) + _unfinished(runs)


def reason_of_end(run: Run) -> str:
    """Why a run failed or was stopped, without the name of the error's class; "" if unknown."""
    return _CLASS.sub("", run.reason)


def _failures(runs: Sequence[Run]) -> list[str]:
    """What failed and why, in a sentence for each of the first few failures."""
    failed = [run for run in runs if run.has_failed]
    sentences = []
    for run in failed[:MOST]:
        who = "The run" if len(runs) == 1 else run.name
        why = reason_of_end(run).rstrip(".") or "it left no reason"
        sentences.append(f"{who} failed after {_reached(run)}: {why}.")
    if len(failed) > MOST:
        sentences.append(f"{len(failed) - MOST} more runs failed.")
    return sentences


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
    name, loss, where = _loss_of(run)
    reached = f"{_count(run.steps[-1].step, 'step')} and {human_count(run.tokens)} tokens"
    sentences = [f"{recipe}: {name} loss {format_loss(loss)} after {reached}{where}."]
    if run.status == "preempted":
        sentences.append(f"It was stopped after {_reached(run)} ({reason_of_end(run) or 'no reason left'}).")
    elif run.status == "killed":
        sentences.append(f"It was killed after {_reached(run)}: {run.reason}.")
    elif run.status != "done":
        sentences.append(f"It is not finished: {_reached(run)} (status: {run.status}).")
    sentences.append("One seed: another would end a little higher or lower.")
    return sentences


def _loss_of(run: Run) -> tuple[str, float | None, str]:
    """The kind of loss that describes a run, the loss, and where it was measured if that is not the end."""
    at = run.final_validation
    if at is None:
        return "train", run.final_train_loss, ""
    is_last = at.step == run.steps[-1].step
    return "validation", at.val_loss, "" if is_last else f", measured at step {at.step:,}"


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
        mean = mean_loss(list(reference.runs.values()), reference.kind)
        return [f"{reference.name}: {loss} {mean}, {_count(len(reference.runs), 'seed')}."]

    to, proven = reference.name, [v for v in others if v.is_proven]
    sentences = [
        f"{v.name} ends {_compared(v, to)}: {_gap(v)} {loss} ({_interval(v)})." for v in proven[:MOST]
    ]
    if len(proven) > MOST:
        sentences.append(f"Proven differences from {to}, besides: {len(proven) - MOST} more.")
    equal = f"equal within {MARGIN} %"
    for words, begin, what in (
        (("no difference seen",), f"No difference from {to} is proven for", _measured),
        ((equal,), f"Equal to {to} within {MARGIN} %:", _measured),
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


def _compared(v: Verdict, to: str) -> str:
    """A proven difference: "worse than bf16", "better than bf16, but within 0.25 %"."""
    word, _, equal = v.conclusion.partition(", ")
    return f"{word} than {to}" + (f", but {equal}" if equal else "")


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


def _unfinished(runs: Sequence[Run]) -> list[str]:
    left = [run.name for run in runs if run.status not in ENDED]
    return [f"Not finished: {listed(left)}."] if left else []


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
    notes += _mfu_note([run for run in runs if run.mfu is not None and run.backend != "emulated"])
    for run in runs:
        if run.status == "preempted" and len(runs) > 1:
            notes.append(f"{run.name} was stopped: {reason_of_end(run) or 'it left no reason'}")
        if run.ignored_lines:
            lines = "line" if run.ignored_lines == 1 else "lines"
            notes.append(f"{run.name}: {run.ignored_lines} torn {lines} of metrics.jsonl left out.")
    return notes


def _warmup_note(runs: Sequence[Run]) -> list[str]:
    """A warning of warm-ups with spikes, in which a small change grows into another run."""
    found = {run.name: ratios for run in runs if (ratios := warmup_spikes(run.steps))}
    if not found:
        return []
    largest = max(ratio for ratios in found.values() for ratio in ratios)
    text = (
        f"The gradient norm spikes in the warm-up of {listed(list(found), 3)}, up to {largest:.0f} times the "
        "median before it: two runs of one seed part there"
    )
    if len(runs) > 1:
        deviation = known_of(runs)
        text += ". This comparison begins in chaos: pairs deviate by about "
        text += f"{deviation:.2g} % whatever the format" if deviation else "0.5 to 0.9 % whatever the format"
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
    notes += [note for v in others if (note := _unpaired_note(v, reference))]
    tokens = {run.tokens for run in runs}
    if len(tokens) == 1:
        notes.append(f"Each run saw {human_count(*tokens)} tokens.")
    else:
        notes.append(_unequal_note(runs))
    return [*notes, *_other_text_note(runs)]


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


def _unequal_note(runs: Sequence[Run]) -> str:
    """A note on what can be compared between runs that processed different numbers of tokens."""
    note = "The runs saw different numbers of tokens: their final losses do not compare, "
    planned = sorted({run.planned_steps for run in runs if run.planned_steps is not None})
    if len(planned) < 2:
        return f"{note}the gaps do."
    lengths = ", ".join(f"{steps:,}" for steps in planned)
    return (
        f"{note}and a gap compares only where both had the same learning rates until then: the runs were "
        f"planned for {lengths} steps."
    )


def _other_text_note(runs: Sequence[Run]) -> list[str]:
    """A note if the runs recorded different corpora: the digest is that of text and tokenizer."""
    if len({str(run.facts["corpus"]) for run in runs if run.facts.get("corpus")}) < 2:
        return []
    return [
        "The runs differ in their text or tokenizer: their losses are of other tokens, and no gap counts."
    ]


def _unpaired_note(v: Verdict, reference: Verdict) -> str:
    """The seeds of a variant without a partner; "" if all have one, or a run failed."""
    unpaired = sorted(set(v.runs) - set(v.gaps))
    if not unpaired or v.has_failed or reference.has_failed:
        return ""
    seeds, one = ", ".join(map(str, unpaired)), len(unpaired) == 1
    return (
        f"{v.name}: seed{'s' * (not one)} {seeds} {'has' if one else 'have'} no equal tokens in "
        f"{reference.name}, and {'is' if one else 'are'} left out."
    )


def _mfu_note(runs: Sequence[Run]) -> list[str]:
    """The peak that MFU refers to, in one note; with the names of the runs if the peaks differ."""
    names_by_peak: dict[str, list[str]] = {}
    for run in runs:
        names_by_peak.setdefault(run.peak_source or "a peak the run did not name", []).append(run.name)
    if len(names_by_peak) < 2:
        return [f"MFU is a share of {peak}." for peak in names_by_peak]
    peaks = "; ".join(f"{peak} ({', '.join(names)})" for peak, names in names_by_peak.items())
    return [f"MFU does not compare here, since the runs have different yardsticks: {peaks}."]


def print_comparison(runs: Sequence[Run], console: Console, found: Sequence[Verdict] = ()) -> None:
    """Print the table with notes below, and for several runs the verdict in words.

    A variant with several seeds is one row; the page also has a row for each seed.
    """
    if runs or found:
        print_table([row for row in table_rows(runs, found) if kind_of(row) != SEED], console)
    for note in table_notes(runs, found) if runs else ():
        console.print(note, style="dim", markup=False, highlight=False)
    if len(runs) > 1 or any(run.status != "done" for run in runs):
        console.print("\n" + " ".join(summary(runs, found)), style="bold", markup=False, highlight=False)
