"""The result of some runs in a few sentences, with its basis.

Failures come first, then what the seeds show, then what they leave open. Nothing is called lower or better
unless its interval excludes zero: the order of losses of single seeds is mostly luck.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial

from narrowgauge.system.t_interval import CONFIDENCE
from narrowgauge.system.units import human_count, signed_percent
from narrowgauge.trainer.report.read.run import ENDED, Run
from narrowgauge.trainer.report.table.table import ends, format_loss, mean_loss
from narrowgauge.trainer.report.verdict.rule import MARGIN
from narrowgauge.trainer.report.verdict.verdict import Verdict, verdicts

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
