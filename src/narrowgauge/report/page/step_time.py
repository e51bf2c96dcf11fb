"""Where the time of a step goes, by class of work, and what each class takes at the least.

It is read from an event that a run with `--profile` has recorded, in milliseconds; `floor_ms` may be missing:

    {"event": "step time", "step": N, "ms": {"GEMMs": 31.0, ...}, "floor_ms": {"GEMMs": 22.5, ...}}

A floor is the time that the machine's ceilings allow; classes without one (waiting) have none, and so much of
their time could go. Runs that recorded nothing of the kind are left out, and without any there is no section.
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
    """A section with two bars a run, measured and floor, and the table; empty where no run has told."""
    told = [(run, found) for run in runs if (found := _account(run)) is not None]
    if not told:
        return ""
    rows = [(f"{run.name}{what}", times) for run, both in told for what, times in _named(both)]
    classes = list(dict.fromkeys(name for _, times in rows for name in times))
    words = {name: [_ms(times.get(name)) for _, times in rows] for name in classes}
    drawn = [Bar(name, times, f"{sum(times.values()):.4g} ms") for name, times in rows]
    cells = [*words.items(), ("together", [_ms(sum(times.values())) for _, times in rows])]
    return (
        f'<section class="step-time"><h2>Step time</h2>{bars(drawn, words, "Step time by class")}'
        f"{numbers([name for name, _ in rows], cells, 'Step time by class')}"
        f"<p>{_WHOLE}{_FLOOR if any(both[1] for _, both in told) else ''}</p></section>"
    )


def _account(run: Run) -> tuple[Times, Times] | None:
    """(measured, floor) in ms of the last event that is whole."""
    for event in reversed(run.events):
        if event["event"] == "step time" and (measured := _times(event.get("ms"))):
            return measured, _times(event.get("floor_ms"))
    return None


def _named(both: tuple[Times, Times]) -> list[tuple[str, Times]]:
    measured, floor = both
    return [("", measured), (", floor", floor)] if floor else [("", measured)]


def _times(value: Any) -> Times:
    found = {str(k): as_float(v) for k, v in value.items()} if isinstance(value, Mapping) else {}
    return {name: ms for name, ms in found.items() if math.isfinite(ms) and ms >= 0}


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g} ms"
