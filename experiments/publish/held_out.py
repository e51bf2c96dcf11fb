"""The table of docs/evidence.md about the held-out tokens."""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.trainer.report.table import percent
from publish.pilot import deviation_interval
from publish.tables import markdown

COLUMNS = ("arm", "seed", "held_out_tokens", "gap", "error")


@dataclass(frozen=True, slots=True)
class Measured:
    """The gap in percent of an arm on a number of held-out tokens, and its sampling error in percent."""

    arm: str
    seed: int
    tokens: int
    gap: float
    error: float


def read_measured(file: Path) -> list[Measured]:
    """The rows of a file; [] without one."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return [
            Measured(arm, int(seed), int(tokens), float(gap), float(error))
            for arm, seed, tokens, gap, error in list(csv.reader(lines))[1:]
        ]


def held_out_markdown(measured: Sequence[Measured]) -> str:
    """How far gaps deviate within their arms, and how far by their sampling error, by held-out tokens."""
    lines = []
    for tokens in sorted({one.tokens for one in measured}):
        these = [one for one in measured if one.tokens == tokens]
        gaps: dict[str, list[float]] = {}
        for one in these:
            gaps.setdefault(one.arm, []).append(one.gap)
        if not (degrees := len(these) - len(gaps)):
            continue
        squares = sum(statistics.variance(of) * (len(of) - 1) for of in gaps.values() if len(of) > 1)
        deviation = math.sqrt(squares / degrees)
        low, high = deviation_interval(deviation, degrees)
        error = math.sqrt(statistics.fmean(one.error**2 for one in these))
        lines.append(
            [
                f"{tokens:,}",
                str(len(these)),
                f"{deviation:.3f} %",
                f"{low:.3f} .. {high:.3f} %",
                f"{error:.3f} %",
                ", ".join(f"{arm} {percent(statistics.fmean(of))}" for arm, of in gaps.items()),
            ]
        )
    head = ("held-out tokens", "gaps", "deviation", "95 %", "by sampling", "mean gaps")
    return markdown(head, lines, left=("mean gaps",)) if lines else "Nothing is measured yet.\n"
