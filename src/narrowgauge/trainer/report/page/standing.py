"""The standing of unfinished runs: state, progress, loss, speed, memory, time left, last event of the guard.

Verdicts of unfinished comparisons are interim. The interval of the rule holds for one look at a fixed end. A
reader who looks again and again, and stops at the first interval that excludes zero, finds a difference that
does not exist more often than one time in twenty. The section states this.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from urllib.parse import quote

from markupsafe import Markup

from narrowgauge.system.units import human_bytes, human_count, human_duration
from narrowgauge.trainer.report.page.events import event_name, reason_of
from narrowgauge.trainer.report.page.html import Table, part
from narrowgauge.trainer.report.read.progress import Progress
from narrowgauge.trainer.report.read.run import ENDED

_INTERIM = (
    "Verdicts are interim until every run is done: an interval holds for one look at the planned end. "
    "Stopping at the first one that excludes zero finds differences that do not exist."
)
_WORDS = {  # of each state, with what to do; the reason of a preempted run names it
    "killed": "the same command line continues it",
    "silent": "its process lives, and has recorded nothing for much longer than a step takes",
    "broken": "its files cannot be read",
}
_ENDS = {
    "killed": "was killed",
    "preempted": "was stopped",
    "diverged": "has diverged",
    "failed": "has failed",
    "broken": "cannot be read",
}
_COLUMNS = ("run", "state", "step", "loss", "val loss", "tokens/s", "memory", "time left", "last record")


def standing(
    found: Sequence[Progress],
    sentences: Sequence[str] = (),
    is_compared: bool = False,
    links: Sequence[str] = (),
    noun: str = "runs",
) -> Markup:
    """A section with a row for each run; empty without runs.

    Args:
        found: The runs, in order.
        sentences: Further sentences, such as the gap that a comparison can detect.
        is_compared: Whether the runs are compared, so that an interim verdict needs its caution.
        links: The address of each run's own page, "" for one without; () without such pages.
        noun: What the rows are.
    """
    if not found:
        return Markup()
    told = [_count(found, noun), *sentences]
    told += [_INTERIM] if is_compared and any(one.state not in ENDED for one in found) else []
    rows = [_row(one, links[i] if links else "") for i, one in enumerate(found)]
    return part("standing", told, Table("Where each run stands", _COLUMNS, rows, ("state",)), _guard(found))


def _row(one: Progress, link: str) -> list[str]:
    return [
        Markup('<a href="{}">{}</a>').format(quote(link), one.name) if link else one.name,
        Markup('<span class="state {0}">{0}</span>{1}').format(one.state, _why(one)),
        _steps(one),
        _loss(one.loss),
        _loss(one.val_loss),
        human_count(one.tokens_per_s) if math.isfinite(one.tokens_per_s) else "-",
        human_bytes(one.memory_bytes) if math.isfinite(one.memory_bytes) else "-",
        "-" if one.seconds_left is None else human_duration(one.seconds_left),
        _when(one.recorded_at),
    ]


def _why(one: Progress) -> Markup:
    """The recorded reason of an end that was not planned, or what to do."""
    texts = [one.reason if one.state in ("failed", "diverged", "preempted", "broken") else ""]
    texts.append(_WORDS.get(one.state, ""))
    text = "; ".join(filter(None, texts))
    return Markup('<div class="why muted">{}</div>').format(text) if text else Markup()


def _steps(one: Progress) -> str:
    if not one.steps:
        return f"{one.step:,}"
    share = min(1.0, one.step / one.steps)
    bar = Markup('{:,} of {:,}<progress max="1" value="{:.4f}" aria-label="{:.0f} %"></progress>')
    return bar.format(one.step, one.steps, share, 100 * share)


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "-"


def _when(seconds: float) -> str:
    """A time; the script of a live page writes its age in its place."""
    if not seconds:
        return "-"
    at = datetime.fromtimestamp(seconds, UTC)
    return Markup('<time datetime="{:%Y-%m-%dT%H:%M:%SZ}">{:%Y-%m-%d %H:%M:%S} UTC</time>').format(at, at)


def _count(found: Sequence[Progress], noun: str) -> str:
    """How many runs there are in each state, and about how long the rest takes."""
    states = [one.state for one in found]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    text = f"{len(found)} {noun}: {', '.join(counts)}."
    if len(found) == 1:
        text = f"The run {_ENDS.get(states[0], f'is {states[0]}')}."
    left = time_left(found)
    return (
        text if left is None else f"{text} About {human_duration(left)} left at the pace of the last steps."
    )


def time_left(found: Sequence[Progress]) -> float | None:
    """Seconds until all runs have ended, if as many as now keep training at the pace of those at work.

    None if no run is at work, or none has a pace. Validations, saves and starts are left out.
    """
    paces = [one.seconds_left / one.left for one in found if one.seconds_left is not None and one.left]
    at_work = [one for one in found if one.is_at_work]
    if not paces:
        return None
    pace = sum(paces) / len(paces)
    own = [pace * one.left if one.seconds_left is None else one.seconds_left for one in at_work]
    waiting = sum(pace * one.left for one in found if one.state in ("waiting", "preempted", "killed"))
    if len(found) == 1:
        return own[0]
    return max(max(own), (sum(own) + waiting) / len(at_work))


def _guard(found: Sequence[Progress]) -> list[str]:
    """The last event of the guard in each run, in a sentence."""
    sentences = []
    for one in found:
        if one.guard:
            event = one.guard[-1]
            reason = f", {reason[:300]}" if (reason := reason_of(event)) else ""
            many = f" ({len(one.guard)} events of the guard)" if len(one.guard) > 1 else ""
            sentences.append(f"{one.name}: {event_name(event)} at step {event['step']:,}{reason}{many}")
    return sentences
