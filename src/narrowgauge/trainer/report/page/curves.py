"""The curves of the page, reduced to the resolution of a screen, and the events along them.

A run of 100,000 steps has more points than a screen has columns. Its steps are grouped into buckets of an
equal number of tokens; each keeps the mean, the least and the greatest value, so the line on the page is a
mean, and the band around it hides no spike. The mean is placed in the middle of its bucket, and all runs of a
page share the buckets: a gap between means of unequal spans would reflect the slope of the loss instead of
the difference of the runs. If every run is short, every step is kept and there is no band.

Non-finite values never reach the page: a bucket counts only its finite values, and one without any is `null`,
a gap in the curve. An event marks the steps whose loss was not finite.

On the time line an event is a mark; a table shows the same without a pointer. A change of settings that
affects the recipe is called a precision change; the guard's change is a raise.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from narrowgauge.trainer.report.page.html import Table
from narrowgauge.trainer.report.read.records import Step
from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.report.table import Cell, listed
from narrowgauge.trainer.report.verdict.verdict import Verdict

SILENT = ("memory", "step time", "audit")  # shown elsewhere
ROWS = 400  # at most, of all runs together
PRECISION = "precision change"

Event = Mapping[str, Any]
T = TypeVar("T")


def event_name(event: Event) -> str:
    """The readable name of an event."""
    name = str(event["event"])
    if name == "convert" or (name == "change" and any(key.startswith("recipe") for key in _changes(event))):
        return PRECISION
    return name


def reason_of(event: Event) -> str:
    """The recorded reason of an event, or the changed settings; empty if neither is recorded."""
    reasons = [str(event["reason"])] if event.get("reason") else []
    reasons += [f"{key}: {old} -> {new}" for key, (old, new) in _changes(event).items()]
    if event["event"] == "raise":
        layers = event.get("layers")
        where = listed([str(layer) for layer in layers], 3) if isinstance(layers, list) else ""
        reasons.insert(0, f"{event.get('place')}: {event.get('from')} -> {event.get('to')} in {where}")
    if isinstance(event.get("from_step"), int):
        reasons.append(f"back from step {event['from_step']:,}")
    if isinstance(bad := event.get("first_bad"), Mapping):
        reasons.append("first at " + ", ".join(str(bad[key]) for key in ("layer", "place") if bad.get(key)))
    return "; ".join(reasons)


def events(runs: Sequence[Run]) -> Table:
    """The events, thinned evenly, with the saves of each run counted in one row."""
    rows: list[tuple[str, str, str, str]] = []
    for run in runs:
        told = [event for event in run.events if event["event"] not in (*SILENT, "save")]
        shown = thin(told, max(4, ROWS // len(runs)))
        for event in shown:
            reason = Cell(reason_of(event)[:300], "reason")
            rows.append((run.name, f"{event['step']:,}", event_name(event), reason))
        if left_out := len(told) - len(shown):
            rows.append((run.name, "", f"{left_out:,} more", "in metrics.jsonl"))
        if saves := run.count("save"):
            rows.append((run.name, "", f"{saves:,} save{'s' * (saves != 1)}", ""))
    return Table("Events", ("run", "step", "event", "reason"), rows, ("event", "reason"))


def thin(items: Sequence[T], limit: int) -> list[T]:
    """Every n-th item, at most `limit`, always with the last one."""
    stride = math.ceil(len(items) / limit) or 1
    return list(items[::-1][::stride][::-1])


def _changes(event: Event) -> dict[str, tuple[object, object]]:
    """(old, new) value by key of a change event; empty for other events."""
    changes = event.get("changes")
    if not isinstance(changes, Mapping):
        return {}
    pairs = ((str(key), value) for key, value in changes.items())
    return {key: (v[0], v[1]) for key, v in pairs if isinstance(v, list) and len(v) == 2}


POINTS_PER_RUN = 1200
POINTS_PER_PAGE = 9000  # about 110 bytes a point: a fifth of the 5 MB a page may have
EVENTS_PER_PAGE = 4000
METRICS = ("loss", "lr", "grad_norm", "tokens_per_s")
Curve = dict[str, list[float | None]]


def page_data(runs: Sequence[Run], found: Sequence[Verdict]) -> dict[str, Any]:
    """All curves and events of the page as JSON-ready values without NaN or infinity."""
    points = max(50, min(POINTS_PER_RUN, POINTS_PER_PAGE // len(runs)))
    events = max(20, EVENTS_PER_PAGE // len(runs))
    variants = [one for one in found if one.runs]
    number = {id(run): i for i, run in enumerate(runs)}
    width = max(_width(run.steps, points) for run in runs)
    data = [_run_data(run, width, points, events) for run in runs]
    for variant, one in enumerate(variants):
        for seed, run in one.runs.items():
            reference = number[id(one.partners[seed])] if seed in one.partners else None
            data[number[id(run)]] |= {"variant": variant, "reference": reference}
    return {"runs": data, "variants": [one.name for one in variants]}


def _run_data(run: Run, width: int, points: int, events: int) -> dict[str, Any]:
    buckets = _buckets(run.steps, width)
    measured = thin(run.validation if run.final_validation is not None else [], points)
    return {
        "name": run.name,
        "emulated": run.backend == "emulated",
        "x": _positions(buckets),
        "end": {axis: (places or [0])[-1] for axis, places in _positions([run.steps[-1:]]).items()},
        "curves": {name: _curve(buckets, name) for name in METRICS},
        "validation": {
            "x": {
                "step": [at.step for at in measured],
                "tokens": [at.tokens for at in measured],
                "seconds": [round_digits(_when(run.steps, at.step)[1]) for at in measured],
            },
            "mean": [round_digits(at.val_loss) for at in measured],
        },
        "events": _events(run, events),
    }


def _width(steps: Sequence[Step], points: int) -> int:
    """The number of tokens in a bucket, so that a run has at most `points` buckets; 0 to keep every step."""
    if len(steps) <= points:
        return 0
    size = math.ceil(len(steps) / (points - 1))  # a run that starts midway has one more partial bucket
    last = steps[-1]
    return size * max(1, round((last.tokens or last.step) / max(1, last.step)))


def _buckets(steps: Sequence[Step], width: int) -> list[Sequence[Step]]:
    """The steps in buckets of `width` tokens, which begin at multiples of it; one step each if it is 0."""
    if not width:
        return [steps[i : i + 1] for i in range(len(steps))]
    return [list(bucket) for _, bucket in groupby(steps, lambda at: -(-(at.tokens or at.step) // width))]


def _positions(buckets: Sequence[Sequence[Step]]) -> dict[str, list[float | None]]:
    """The middles of the buckets on each of the three selectable axes."""
    ends = [(bucket[0], bucket[-1]) for bucket in buckets if bucket]
    return {
        "step": [_middle(a.step, b.step) for a, b in ends],
        "tokens": [_middle(a.tokens, b.tokens) for a, b in ends],
        "seconds": [round_digits((a.seconds + b.seconds) / 2) for a, b in ends],
    }


def _middle(first: int, last: int) -> float:
    return (first + last) / 2 if (first + last) % 2 else (first + last) // 2


def _curve(buckets: Sequence[Sequence[Step]], name: str) -> Curve:
    """The mean of each bucket; also least and greatest if buckets hold more than one step."""
    finite = [[v for step in bucket if math.isfinite(v := getattr(step, name))] for bucket in buckets]
    curve: Curve = {"mean": [round_digits(math.fsum(v) / len(v)) if v else None for v in finite]}
    if name != "lr" and any(len(bucket) > 1 for bucket in buckets):
        curve["least"] = [round_digits(min(v)) if v else None for v in finite]
        curve["greatest"] = [round_digits(max(v)) if v else None for v in finite]
    return curve


def _events(run: Run, limit: int) -> list[dict[str, Any]]:
    """The events, at most `limit`, thinned evenly; saves and other events get half each.

    Each sequence of steps whose loss was not finite is an event at its start.
    """
    found = [event for event in run.events if event["event"] not in SILENT]
    for is_finite, steps in groupby(run.steps, lambda step: math.isfinite(step.loss)):
        if not is_finite:
            reason = "the loss was not finite"
            found.append({"event": "not finite", "reason": reason, "step": next(steps).step})
    saves = [event for event in found if event["event"] == "save"]
    others = [event for event in found if event["event"] != "save"]
    marks = []
    for event in sorted(thin(others, limit // 2) + thin(saves, limit // 2), key=lambda event: event["step"]):
        tokens, seconds = _when(run.steps, event["step"])
        x = {"step": event["step"], "tokens": tokens, "seconds": round_digits(seconds)}
        marks.append({"kind": event_name(event), "x": x, "reason": reason_of(event)[:200]})
    return marks


def _when(steps: Sequence[Step], number: int) -> tuple[int, float]:
    """(tokens, seconds) at the last recorded step up to `number`; zeros before the first."""
    last = bisect_right(steps, number, key=lambda step: step.step)
    return (steps[last - 1].tokens, steps[last - 1].seconds) if last else (0, 0.0)


def round_digits(value: float, digits: int = 6) -> float | None:
    """A value rounded to the significant digits that a screen shows; None if it is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
