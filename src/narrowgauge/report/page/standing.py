"""The standing of unfinished runs: state, progress, loss, speed, memory, time left, last event of the guard.

Verdicts of unfinished comparisons are interim. The interval of the rule holds for one look at a fixed end. A
reader who looks again and again, and stops at the first interval that excludes zero, finds a difference that
does not exist more often than one time in twenty. The section states this.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from urllib.parse import quote

from narrowgauge.report.page.events import event_name, reason_of
from narrowgauge.report.read.progress import ENDED, Progress
from narrowgauge.units import human_bytes, human_count, human_duration

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
_TEXT = ("run", "state")
_NUMBER = ' class="number"'


def standing(
    found: Sequence[Progress],
    sentences: Sequence[str] = (),
    is_compared: bool = False,
    links: Sequence[str] = (),
    noun: str = "runs",
) -> str:
    """A section with a row for each run; empty without runs.

    Args:
        found: The runs, in order.
        sentences: Further sentences, such as the gap that a comparison can detect.
        is_compared: Whether the runs are compared, so that an interim verdict needs its caution.
        links: The address of each run's own page; () without such pages.
        noun: What the rows are.
    """
    if not found:
        return ""
    head = "".join(f'<th scope="col"{"" if name in _TEXT else _NUMBER}>{name}</th>' for name in _COLUMNS)
    body = "".join(_row(one, links[i] if links else "") for i, one in enumerate(found))
    told = [_count(found, noun), *sentences]
    told += [_INTERIM] if is_compared and any(one.state not in ENDED for one in found) else []
    return (
        '<section class="standing"><h2>Where it stands</h2>'
        f"{''.join(f'<p>{escape(sentence)}</p>' for sentence in told)}"
        '<div class="scroll" tabindex="0" role="region" aria-label="Where each run stands"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{_guard(found)}</section>"
    )


def _row(one: Progress, link: str) -> str:
    name = f'<a href="{quote(link)}">{escape(one.name)}</a>' if link else escape(one.name)
    cells = [
        f'<span class="state {escape(one.state)}">{escape(one.state)}</span>{_why(one)}',
        _steps(one),
        _loss(one.loss),
        _loss(one.val_loss),
        human_count(one.tokens_per_s) if math.isfinite(one.tokens_per_s) else "-",
        human_bytes(one.memory_bytes) if math.isfinite(one.memory_bytes) else "-",
        "-" if one.seconds_left is None else human_duration(one.seconds_left),
        _when(one.recorded_at),
    ]
    tds = "".join(
        f"<td{'' if column in _TEXT else _NUMBER}>{cell}</td>"
        for column, cell in zip(_COLUMNS[1:], cells, strict=True)
    )
    return f'<tr><th scope="row">{name}</th>{tds}</tr>'


def _why(one: Progress) -> str:
    """The recorded reason of an end that was not planned, or what to do."""
    texts = [one.reason if one.state in ("failed", "diverged", "preempted", "broken") else ""]
    texts.append(_WORDS.get(one.state, ""))
    text = "; ".join(filter(None, texts))
    return f'<div class="why muted">{escape(text)}</div>' if text else ""


def _steps(one: Progress) -> str:
    if not one.steps:
        return f"{one.step:,}"
    share = min(1.0, one.step / one.steps)
    bar = f'<progress max="1" value="{share:.4f}" aria-label="{100 * share:.0f} %"></progress>'
    return f"{one.step:,} of {one.steps:,}{bar}"


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "-"


def _when(seconds: float) -> str:
    """A time; the script of a live page writes its age in its place."""
    if not seconds:
        return "-"
    at = datetime.fromtimestamp(seconds, UTC)
    return f'<time datetime="{at:%Y-%m-%dT%H:%M:%SZ}">{at:%Y-%m-%d %H:%M:%S} UTC</time>'


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


def _guard(found: Sequence[Progress]) -> str:
    """The last event of the guard in each run, in a sentence."""
    items = ""
    for one in found:
        if one.guard:
            event = one.guard[-1]
            reason = reason_of(event)[:300]
            text = f"{one.name}: {event_name(event)} at step {event['step']:,}" + (
                f", {reason}" if reason else ""
            )
            many = f" ({len(one.guard)} events of the guard)" if len(one.guard) > 1 else ""
            items += f"<li>{escape(text + many)}</li>"
    return f'<ul class="notes">{items}</ul>' if items else ""
