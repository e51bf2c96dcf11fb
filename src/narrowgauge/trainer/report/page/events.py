"""The events of a run: their readable names and reasons, and a table.

On the time line an event is a mark; the table shows the same without a pointer. A change of settings that
affects the recipe is called a precision change; the guard's change is a raise.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from narrowgauge.trainer.report.page.html import Cell, Table
from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.report.table.sentence import listed

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
    """The events, with saves counted in one row."""
    rows = [row for run in runs for row in _rows(run, max(4, ROWS // len(runs)))]
    return Table("Events", ("run", "step", "event", "reason"), rows, ("event", "reason"))


def _rows(run: Run, most: int) -> list[tuple[str, str, str, str]]:
    """(run, step, event, reason) of the events of a run, thinned evenly."""
    all_events = [event for event in run.events if event["event"] not in (*SILENT, "save")]
    shown = thin(all_events, most)
    rows: list[tuple[str, str, str, str]] = [
        (run.name, f"{event['step']:,}", event_name(event), Cell(reason_of(event)[:300], "reason"))
        for event in shown
    ]
    if left_out := len(all_events) - len(shown):
        rows.append((run.name, "", f"{left_out:,} more", "in metrics.jsonl"))
    if saves := run.count("save"):
        rows.append((run.name, "", f"{saves:,} save{'s' * (saves != 1)}", ""))
    return rows


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
