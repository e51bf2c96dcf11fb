"""The curves of the page, as few numbers as the eye can tell apart.

A run of 100,000 steps has more points than a screen has columns. Its steps are laid into buckets of equal
size; each keeps the mean, the least and the greatest value, so the line on the page is a mean and the band
around it hides no spike. A run short enough keeps every step, and needs no band.

Non-finite values never reach the page: a bucket counts only its finite values, and one without any is
`null`, a hole in the curve. Where the loss was not finite, an event says so.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from narrowgauge.report.page.events import SILENT, kind_of, reason_of
from narrowgauge.report.read.run import Run, Step

POINTS_PER_RUN = 1200
POINTS_PER_PAGE = 9000  # about 110 bytes a point: a fifth of the 5 MB a page may have
EVENTS_PER_PAGE = 4000
METRICS = ("loss", "lr", "grad_norm", "tokens_per_s")
T = TypeVar("T")
Curve = dict[str, list[float | None]]


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything the page draws, as JSON-ready values without NaN or infinity."""
    points = max(50, min(POINTS_PER_RUN, POINTS_PER_PAGE // len(runs)))
    events = max(20, EVENTS_PER_PAGE // len(runs))
    return {"runs": [_run_data(run, points, events) for run in runs]}


def _run_data(run: Run, points: int, events: int) -> dict[str, Any]:
    buckets = _buckets(run.steps, points)
    clock = _Clock(run.steps)
    measured = thin(run.validation, points)
    return {
        "name": run.name,
        "emulated": run.backend == "emulated",
        "x": _places([bucket[-1] for bucket in buckets]),
        "curves": {name: _curve(buckets, name) for name in METRICS},
        "validation": {
            "x": {
                "step": [at.step for at in measured],
                "tokens": [at.tokens for at in measured],
                "seconds": [_short(clock.at(at.step)[1]) for at in measured],
            },
            "mean": [_short(at.val_loss) for at in measured],
        },
        "events": _events(run, clock, events),
    }


def _buckets(steps: Sequence[Step], points: int) -> list[Sequence[Step]]:
    """The steps cut into at most `points` runs of equal length (the last may be shorter)."""
    size = math.ceil(len(steps) / points) or 1
    return [steps[start : start + size] for start in range(0, len(steps), size)]


def _places(steps: Sequence[Step]) -> dict[str, list[float | None]]:
    """Where points lie on each of the three axes one can choose."""
    return {
        "step": [step.step for step in steps],
        "tokens": [step.tokens for step in steps],
        "seconds": [_short(step.seconds) for step in steps],
    }


def _curve(buckets: Sequence[Sequence[Step]], name: str) -> Curve:
    """Mean of each bucket; least and greatest too, where a bucket holds more than one step."""
    finite = [[v for step in bucket if math.isfinite(v := getattr(step, name))] for bucket in buckets]
    curve: Curve = {"mean": [_short(math.fsum(v) / len(v)) if v else None for v in finite]}
    if buckets and len(buckets[0]) > 1 and name != "lr":
        curve["least"] = [_short(min(v)) if v else None for v in finite]
        curve["greatest"] = [_short(max(v)) if v else None for v in finite]
    return curve


def _events(run: Run, clock: "_Clock", limit: int) -> list[dict[str, Any]]:
    """The events, thinned evenly where there are very many; saves give way first."""
    marks = (event for event in run.events if event["event"] not in SILENT)
    found = [dict(event) for event in marks] + _non_finite(run.steps)
    saves = [event for event in found if event["event"] == "save"]
    others = [event for event in found if event["event"] != "save"]
    kept = thin(others, limit // 2) + thin(saves, limit // 2)
    return [_event(event, clock) for event in sorted(kept, key=lambda event: event["step"])]


def _event(event: Mapping[str, Any], clock: "_Clock") -> dict[str, Any]:
    tokens, seconds = clock.at(event["step"])
    x = {"step": event["step"], "tokens": tokens, "seconds": _short(seconds)}
    return {"kind": kind_of(event), "x": x, "reason": reason_of(event)[:200]}


def _non_finite(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """An event at the start of each stretch of steps whose loss was not finite."""
    bad = [not math.isfinite(step.loss) for step in steps]
    starts = [i for i, now in enumerate(bad) if now and not (i and bad[i - 1])]
    event = {"event": "not finite", "reason": "the loss was not finite"}
    return [{**event, "step": steps[i].step} for i in starts]


def thin(items: Sequence[T], limit: int) -> list[T]:
    """Every n-th item so that at most `limit` stay; the last one always does."""
    every = math.ceil(len(items) / limit) or 1
    return list(items[::-1][::every][::-1])


class _Clock:
    """Tokens and seconds at a step number, also at one that left no record of its own."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.numbers = [step.step for step in steps]

    def at(self, number: int) -> tuple[int, float]:
        """(tokens, seconds) at the last recorded step up to `number`; zeros before the first."""
        last = bisect_right(self.numbers, number)
        return (self.steps[last - 1].tokens, self.steps[last - 1].seconds) if last else (0, 0.0)


def _short(value: float) -> float | None:
    """Six digits are more than a screen shows; None for what is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
