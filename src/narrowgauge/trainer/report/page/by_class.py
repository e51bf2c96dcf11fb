"""Memory and the time of a step by class: stacked bars of one scale, and a table of their values.

A part is told apart by its colour, its hatching and, if there is room, its name; it shows its value on hover
or focus. The times are those of an event that a run with `--profile` records; `floor_ms` may be missing:

    {"event": "step time", "step": N, "ms": {"GEMMs": 31.0, ...}, "floor_ms": {"GEMMs": 22.5, ...}}

A floor is the least time that the machine's peak rates allow. A class without a floor (waiting) is pure
overhead.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.system.units import human_bytes
from narrowgauge.trainer.report.page.html import Table
from narrowgauge.trainer.report.read.records import as_float
from narrowgauge.trainer.report.read.run import Run

HATCHES = 8  # patterns in page.css


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        name: The text at the head of the bar.
        sizes: Sizes by class, in stacking order; none is negative.
        texts: The sizes as texts.
        total: The text at the end of the bar.
        mark: A size marked with a line, such as a limit.
    """

    name: str
    sizes: Mapping[str, float]
    texts: Mapping[str, str]
    total: str
    mark: float | None = None


@dataclass(frozen=True)
class ByClass:
    """Bars, and further rows of their table; `label` is the accessible name."""

    label: str
    bars: Sequence[Bar]
    more: Mapping[str, Sequence[str]]

    @property
    def classes(self) -> list[str]:
        """The classes of all bars, in the order of the key."""
        return list(dict.fromkeys(name for bar in self.bars for name in bar.sizes))

    def hatch(self, name: str) -> int:
        """The number of a class's pattern."""
        return self.classes.index(name) % HATCHES

    def share(self, size: float) -> float:
        """A size in percent of the longest bar."""
        return 100 * size / (max(max(sum(bar.sizes.values()), bar.mark or 0.0) for bar in self.bars) or 1.0)

    def parts(self, bar: Bar) -> list[tuple[str, float, str]]:
        """(class, percent, text) of each part of a bar."""
        sizes = [(name, self.share(size)) for name, size in bar.sizes.items() if size > 0]
        return [(name, share, f"{bar.name}, {name}: {bar.texts[name]}") for name, share in sizes]

    def table(self) -> Table:
        """A row for each class, a column for each bar."""
        rows = [[name, *(bar.texts.get(name, "-") for bar in self.bars)] for name in self.classes]
        rows += [[name, *texts] for name, texts in self.more.items()]
        return Table(self.label, ["class", *(bar.name for bar in self.bars)], rows)


def memory(runs: Sequence[Run]) -> ByClass | None:
    """The bytes of each class, and per parameter; None if no run has recorded them."""
    measured = [(run.name, event) for run in runs if (event := _memory_event(run)) is not None]
    if not measured:
        return None
    more = {
        "together": [human_bytes(event["peak"]) for _, event in measured],
        "expected": [human_bytes(event["expected"]["peak"]) for _, event in measured],
    }
    if any(event["host_bytes"] for _, event in measured):
        more["on the host"] = [human_bytes(sum(event["host_bytes"].values())) for _, event in measured]
    return ByClass("Memory by class", [_of_memory(name, event) for name, event in measured], more)


def _of_memory(name: str, event: Mapping[str, Any]) -> Bar:
    sizes = {kind: size for kind, size in event["bytes"].items() if size}
    texts = {kind: f"{human_bytes(size)} ({size / event['parameters']:.2f})" for kind, size in sizes.items()}
    return Bar(name, sizes, texts, human_bytes(event["peak"]), event["expected"]["peak"])


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


def step_time(runs: Sequence[Run]) -> ByClass | None:
    """Two bars for each run, measured and floor; None without profiles."""
    bars = [bar for run in runs for bar in _of_steps(run)]
    if not bars:
        return None
    return ByClass("Step time by class", bars, {"together": [bar.total for bar in bars]})


def _of_steps(run: Run) -> list[Bar]:
    """The measured times and the floor of the last complete event."""
    for event in reversed(run.events):
        if event["event"] == "step time" and (measured := _times(event.get("ms"))):
            floor = _times(event.get("floor_ms"))
            return [_bar(run.name, measured)] + ([_bar(f"{run.name}, floor", floor)] if floor else [])
    return []


def _bar(name: str, times: Mapping[str, float]) -> Bar:
    texts = {kind: f"{ms:.4g} ms" for kind, ms in times.items()}
    return Bar(name, times, texts, f"{sum(times.values()):.4g} ms")


def _times(value: Any) -> dict[str, float]:
    times = {str(k): as_float(v) for k, v in value.items()} if isinstance(value, Mapping) else {}
    return {name: ms for name, ms in times.items() if math.isfinite(ms) and ms >= 0}
