"""The time of a step by class of work, and the least time that each class can take.

The source is an event that a run with `--profile` records, in milliseconds; `floor_ms` may be missing:

    {"event": "step time", "step": N, "ms": {"GEMMs": 31.0, ...}, "floor_ms": {"GEMMs": 22.5, ...}}

A floor is the least time that the machine's peak rates allow. A class without a floor (waiting) is pure
overhead. Runs without such an event are left out; without any there is no section.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from narrowgauge.report.page.bars import Bar, bars, numbers
from narrowgauge.report.read.records import as_float
from narrowgauge.report.read.run import Run

Times = dict[str, float]

_WHOLE = "A step while it was profiled, which makes it longer."
_FLOOR = (
    " Floor: what the same work takes at the ceilings of this machine, its fastest arithmetic and its memory "
    "at full speed. A class without a floor is overhead."
)


def step_time(runs: Sequence[Run]) -> str:
    """A section with two bars for each run, measured and floor, and the table; empty without profiles."""
    profiled = [(run, times) for run in runs if (times := _profile(run)) is not None]
    if not profiled:
        return ""
    rows = [(f"{run.name}{what}", times) for run, both in profiled for what, times in _named(both)]
    classes = list(dict.fromkeys(name for _, times in rows for name in times))
    texts = {name: [_ms(times.get(name)) for _, times in rows] for name in classes}
    drawn = [Bar(name, times, f"{sum(times.values()):.4g} ms") for name, times in rows]
    cells = [*texts.items(), ("together", [_ms(sum(times.values())) for _, times in rows])]
    return (
        f'<section class="step-time"><h2>Step time</h2>{bars(drawn, texts, "Step time by class")}'
        f"{numbers([name for name, _ in rows], cells, 'Step time by class')}"
        f"<p>{_WHOLE}{_FLOOR if any(both[1] for _, both in profiled) else ''}</p></section>"
    )


def _profile(run: Run) -> tuple[Times, Times] | None:
    """(measured, floor) in ms from the last complete event."""
    for event in reversed(run.events):
        if event["event"] == "step time" and (measured := _times(event.get("ms"))):
            return measured, _times(event.get("floor_ms"))
    return None


def _named(both: tuple[Times, Times]) -> list[tuple[str, Times]]:
    measured, floor = both
    return [("", measured), (", floor", floor)] if floor else [("", measured)]


def _times(value: Any) -> Times:
    times = {str(k): as_float(v) for k, v in value.items()} if isinstance(value, Mapping) else {}
    return {name: ms for name, ms in times.items() if math.isfinite(ms) and ms >= 0}


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g} ms"
