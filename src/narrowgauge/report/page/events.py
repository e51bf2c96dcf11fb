"""What happened in a run besides its steps: the events in words, and as a table.

On the time line an event is a mark; the table says the same without pointing at anything. A change of the
settings that touches the recipe is a change of precision, and is told apart from other changes.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from narrowgauge.report.read.run import Run

SILENT = ("memory", "step time")  # they have bars of their own
ROWS = 400  # of all runs together
PRECISION = "precision change"

Event = Mapping[str, Any]


def kind_of(event: Event) -> str:
    """What kind of event it is, for people."""
    kind = str(event["event"])
    if kind == "convert" or (kind == "change" and any(key.startswith("recipe") for key in _changes(event))):
        return PRECISION
    return kind


def reason_of(event: Event) -> str:
    """Why it happened, or what was changed; empty where nothing is said."""
    words = [str(event["reason"])] if event.get("reason") else []
    words += [f"{key}: {old} -> {new}" for key, (old, new) in _changes(event).items()]
    if isinstance(event.get("from_step"), int):
        words.append(f"back from step {event['from_step']:,}")
    if isinstance(bad := event.get("first_bad"), Mapping):
        words.append("first at " + ", ".join(str(bad[key]) for key in ("layer", "place") if bad.get(key)))
    return "; ".join(words)


def events(runs: Sequence[Run]) -> str:
    """A table that can be opened, saves counted in one line; empty where nothing happened."""
    rows = [row for run in runs for row in _rows(run, max(4, ROWS // len(runs)))]
    if not rows:
        return ""
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="number">{escape(at)}</td><td>{escape(kind)}</td>'
        f'<td class="reason">{escape(reason)}</td></tr>'
        for name, at, kind, reason in rows
    )
    return (
        "<details><summary>The events as a table</summary>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Events"><table><thead><tr>'
        '<th scope="col">run</th><th scope="col" class="number">step</th><th scope="col">event</th>'
        f'<th scope="col">reason</th></tr></thead><tbody>{body}</tbody></table></div></details>'
    )


def _rows(run: Run, most: int) -> list[tuple[str, str, str, str]]:
    """(run, step, kind, reason) of the first and the last events of a run, in their order."""
    told = [event for event in run.events if event["event"] not in (*SILENT, "save")]
    half = most // 2
    left_out = len(told) - 2 * half
    if left_out > 0:
        told = [*told[:half], *told[-half:]]
    rows = [(run.name, f"{event['step']:,}", kind_of(event), reason_of(event)[:300]) for event in told]
    if left_out > 0:
        rows.insert(half, (run.name, "", f"{left_out:,} more", "in metrics.jsonl"))
    if saves := run.count("save"):
        rows.append((run.name, "", f"{saves:,} save{'s' * (saves != 1)}", ""))
    return rows


def _changes(event: Event) -> dict[str, tuple[object, object]]:
    """Old and new value by key, of an event that has any."""
    changes = event.get("changes")
    if not isinstance(changes, Mapping):
        return {}
    pairs = ((str(key), value) for key, value in changes.items())
    return {key: (v[0], v[1]) for key, v in pairs if isinstance(v, list) and len(v) == 2}
