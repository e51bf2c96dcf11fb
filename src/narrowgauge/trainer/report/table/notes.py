"""Notes below the table of runs, one sentence each, and both for a terminal."""

from collections.abc import Sequence

from rich.console import Console

from narrowgauge.system.t_interval import CONFIDENCE
from narrowgauge.system.units import human_count
from narrowgauge.trainer.report.read.run import FINAL_STEPS, Run
from narrowgauge.trainer.report.read.steps import warmup_spikes
from narrowgauge.trainer.report.table.sentence import listed, reason_of_end, summary
from narrowgauge.trainer.report.table.table import print_table, table_rows
from narrowgauge.trainer.report.verdict.held_out import sampling_error
from narrowgauge.trainer.report.verdict.rule import Judgement
from narrowgauge.trainer.report.verdict.verdict import Verdict, known_of, verdicts


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
    notes += _held_out_note(runs, judged)
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


def _held_out_note(runs: Sequence[Run], judged: Sequence[Judgement]) -> list[str]:
    """How far the held-out tokens move gaps, if that is most of what seeds deviate or no seeds tell."""
    last = runs[0].final_validation
    if not (error := sampling_error(runs)) or last is None:
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
    listed = ", ".join(f"{steps:,}" for steps in planned)
    return (
        f"{note}and a gap compares only where both had the same learning rates until then: the runs were "
        f"planned for {listed} steps."
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
    listed, one = ", ".join(map(str, unpaired)), len(unpaired) == 1
    return (
        f"{v.name}: seed{'s' * (not one)} {listed} {'has' if one else 'have'} no equal tokens in "
        f"{reference.name}, and {'is' if one else 'are'} left out."
    )


def _mfu_note(runs: Sequence[Run]) -> list[str]:
    """The peak that MFU refers to, in one note; with the names of the runs if the peaks differ."""
    names_by_peak: dict[str, list[str]] = {}
    for run in runs:
        names_by_peak.setdefault(run.peak_source or "a peak the run did not name", []).append(run.name)
    if len(names_by_peak) < 2:
        return [f"MFU is a share of {peak}." for peak in names_by_peak]
    listed = "; ".join(f"{peak} ({', '.join(names)})" for peak, names in names_by_peak.items())
    return [f"MFU does not compare here, since the runs have different yardsticks: {listed}."]


def print_comparison(runs: Sequence[Run], console: Console, found: Sequence[Verdict] = ()) -> None:
    """Print the table with notes below, and for several runs the verdict in words.

    A variant with several seeds is one row; the page also has a row for each seed.
    """
    if runs or found:
        print_table([row.cells for row in table_rows(runs, found) if not row.is_seed], console)
    for note in table_notes(runs, found) if runs else ():
        console.print(note, style="dim", markup=False, highlight=False)
    if len(runs) > 1 or any(run.status != "done" for run in runs):
        console.print("\n" + " ".join(summary(runs, found)), style="bold", markup=False, highlight=False)
