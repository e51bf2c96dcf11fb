"""What each linear layer of a run computed in, whether it was called, and whether a gradient reached it.

A run under a narrow recipe records it in its first step (`nn.audit`), each process for its own part of the
model; the metrics have that of the first process.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from narrowgauge.report.read.run import Run

ROWS = 400  # at most, of all runs together
_COLUMNS = ("layer", "cast", "calls", "gradient", "note")


def audit(runs: Sequence[Run]) -> str:
    """A collapsible table of the layers of each run; empty if no run has recorded them."""
    audited = [(run.name, layers) for run in runs if (layers := _layers(run))]
    most = max(4, ROWS // max(1, len(audited)))
    return "".join(_table(name, layers, most, len(runs) == 1) for name, layers in audited)


def _layers(run: Run) -> list[Mapping[str, Any]]:
    """The layers in the last event that has some; those with a note come first."""
    for event in reversed(run.events):
        layers = event.get("layers") if event["event"] == "audit" else None
        if isinstance(layers, list):
            found = [layer for layer in layers if isinstance(layer, Mapping) and "layer" in layer]
            return sorted(found, key=lambda layer: not layer.get("note"))
    return []


def _table(run: str, layers: Sequence[Mapping[str, Any]], most: int, is_alone: bool) -> str:
    noted = sum(bool(layer.get("note")) for layer in layers)
    of_run = "" if is_alone else f" of {escape(run)}"
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(_text(layer.get("layer")))}</code></th>'
        + "".join(f"<td>{escape(_text(layer.get(column)))}</td>" for column in _COLUMNS[1:])
        + "</tr>"
        for layer in layers[:most]
    )
    more = f"<p>{len(layers) - most:,} more in metrics.jsonl.</p>" if len(layers) > most else ""
    head = "".join(f'<th scope="col">{column}</th>' for column in _COLUMNS)
    title = f"The linear layers{of_run} in the first step: {len(layers):,}, {noted:,} with a note"
    return (
        f"<details><summary>{title}</summary>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Linear layers"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{more}</details>"
    )


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)[:300]
