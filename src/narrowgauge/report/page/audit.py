"""What each linear layer of a run computed in, whether it was called, and whether a gradient reached it.

A run under a narrow recipe records it in its first step (`nn.audit`), each process for its own part of the
model; the metrics have that of the first process.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from narrowgauge.report.page.html import Table
from narrowgauge.report.read.run import Run

ROWS = 400  # at most, of all runs together
_COLUMNS = ("layer", "cast", "calls", "gradient", "note")


def audit(runs: Sequence[Run]) -> list[tuple[str, Table, int]]:
    """(title, table, number of layers left out) of each run that has recorded its layers."""
    audited = [(run.name, layers) for run in runs if (layers := _layers(run))]
    most = max(4, ROWS // max(1, len(audited)))
    found = []
    for name, layers in audited:
        noted = sum(bool(layer.get("note")) for layer in layers)
        of_run = "" if len(runs) == 1 else f" of {name}"
        title = f"The linear layers{of_run} in the first step: {len(layers):,}, {noted:,} with a note"
        rows = [[_text(layer.get(column)) for column in _COLUMNS] for layer in layers[:most]]
        table = Table("Linear layers", _COLUMNS, rows, None, is_code=True)
        found.append((title, table, max(0, len(layers) - most)))
    return found


def _layers(run: Run) -> list[Mapping[str, Any]]:
    """The layers in the last event that has some; those with a note come first."""
    for event in reversed(run.events):
        layers = event.get("layers") if event["event"] == "audit" else None
        if isinstance(layers, list):
            found = [layer for layer in layers if isinstance(layer, Mapping) and "layer" in layer]
            return sorted(found, key=lambda layer: not layer.get("note"))
    return []


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)[:300]
