"""The memory of runs by class of tensor: stacked bars, and a table of their values."""

from collections.abc import Mapping, Sequence
from typing import Any

from narrowgauge.report.page.bars import Bar, bars, numbers
from narrowgauge.report.read.run import Run
from narrowgauge.units import human_bytes


def memory(runs: Sequence[Run]) -> str:
    """A section with the bytes of each class, and per parameter; empty if no run has recorded them."""
    measured = [(run, event) for run in runs if (event := _memory_event(run)) is not None]
    if not measured:
        return ""
    classes = list(
        dict.fromkeys(name for _, event in measured for name, size in event["bytes"].items() if size)
    )
    rows = [(name, [_cell(event, "bytes", name) for _, event in measured]) for name in classes]
    rows.append(("together", [human_bytes(event["peak"]) for _, event in measured]))
    rows.append(("expected", [human_bytes(event["expected"]["peak"]) for _, event in measured]))
    if any(event["host_bytes"] for _, event in measured):
        rows.append(
            ("on the host", [human_bytes(sum(event["host_bytes"].values())) for _, event in measured])
        )
    return (
        '<section class="memory"><h2>Memory</h2>'
        + bars(*_bars(measured, classes), "Memory by class")
        + numbers([run.name for run, _ in measured], rows, "Memory by class")
        + "<p>In brackets: bytes per parameter. Measured in the first step of the last process. The line "
        "across a bar is the expected memory: the same step simulated on tensors without data.</p></section>"
    )


def _bars(
    measured: Sequence[tuple[Run, Mapping[str, Any]]], classes: Sequence[str]
) -> tuple[list[Bar], dict[str, list[str]]]:
    """A bar for each run, and the texts of its parts by class."""
    rows = [
        Bar(
            run.name,
            {name: event["bytes"].get(name, 0) for name in classes},
            human_bytes(event["peak"]),
            event["expected"]["peak"],
        )
        for run, event in measured
    ]
    texts = {name: [_size_text(event, name) for _, event in measured] for name in classes}
    return rows, texts


def _size_text(event: Mapping[str, Any], name: str) -> str:
    size = event["bytes"].get(name, 0)
    return f"{human_bytes(size)}, {size / event['parameters']:.2f} bytes a parameter"


def _memory_event(run: Run) -> Mapping[str, Any] | None:
    """The last complete memory event of a run."""
    for event in reversed(run.events):
        if event["event"] == "memory" and _is_complete(event):
            return event
    return None


def _is_complete(event: Mapping[str, Any]) -> bool:
    def are_sizes(value: object) -> bool:
        return isinstance(value, Mapping) and all(isinstance(v, int) for v in value.values())

    expected = event.get("expected")
    return (
        are_sizes(event.get("bytes"))
        and are_sizes(event.get("host_bytes"))
        and isinstance(event.get("peak"), int)
        and isinstance(event.get("parameters"), int)
        and event["parameters"] > 0
        and isinstance(expected, Mapping)
        and isinstance(expected.get("peak"), int)
    )


def _cell(event: Mapping[str, Any], key: str, name: str) -> str:
    size = event[key].get(name, 0)
    return f"{human_bytes(size)} ({size / event['parameters']:.2f})"
