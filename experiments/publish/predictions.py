"""Predictions that were written down before the runs, and what became of them.

They are the rows of a Markdown table:

    | arm | against | loss | rung | predicted gap | why |

The gap of `arm` to `against` is taken for each seed, by the loss `own` or `bf16` of both, at a rung; 3 - 1 is
the gap at rung 3 minus that at rung 1. The predicted gap is a range of the mean in percent, +0.30 .. +1.60.
The prediction is held if the 95 % interval of the mean lies inside of the range, wrong if outside, else open.
Minus signs may be typographic.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.system.errors import UserError
from narrowgauge.system.t_interval import Interval, interval
from narrowgauge.trainer.report.verdict.verdict import DIVERGED, Row, gap_percent

HEAD = ("arm", "against", "loss", "rung", "predicted gap", "why")
_RUNG = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")
_RANGE = re.compile(r"([+-]?[\d.]+|[+-]?inf)\s*\.\.\s*([+-]?[\d.]+|[+-]?inf)")
_FORECAST = re.compile(r"forecast ([+-][\d.]+)")


@dataclass(frozen=True, slots=True)
class Prediction:
    """A row of the table: a range in percent of the gap of one arm to another.

    Attributes:
        before: The rung whose gap is subtracted; 0 for none.
    """

    arm: str
    against: str
    loss: str
    rung: int
    before: int
    low: float
    high: float
    why: str

    @property
    def what(self) -> str:
        """The gap that is predicted, for people."""
        rung = f"rung {self.rung}" + (f" - rung {self.before}" if self.before else "")
        return f"{rung}, to {self.against}" + ("" if self.loss == "own" else f", {self.loss} forward")

    @property
    def forecast(self) -> float | None:
        """The gap that `predict` gave in percent, if the range is its interval: `why` is forecast +1.94."""
        found = _FORECAST.fullmatch(self.why)
        return float(found[1]) if found else None


def read_predictions(text: str) -> list[Prediction]:
    """The predictions in a Markdown text.

    Raises:
        UserError: a row of the table cannot be read.
    """
    found, is_table = [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if tuple(cells) == HEAD:
            is_table = True
        elif not line.lstrip().startswith("|"):
            is_table = False
        elif is_table and set(line) - set("|:- "):
            found.append(_prediction(cells, line))
    return found


def _prediction(cells: Sequence[str], line: str) -> Prediction:
    plain = [cell.replace("\u2212", "-").replace("`", "") for cell in cells]
    rungs = _RUNG.fullmatch(plain[3]) if len(plain) == len(HEAD) else None
    ends = _RANGE.fullmatch(plain[4]) if rungs else None
    if rungs is None or ends is None or plain[2] not in ("own", "bf16"):
        raise UserError(
            f"{line!r} is no prediction; write | {' | '.join(HEAD)} | with own or bf16, a rung such as "
            "3 or 3 - 1, and a range such as +0.30 .. +1.60"
        )
    return Prediction(
        plain[0],
        plain[1],
        plain[2],
        int(rungs[1]),
        int(rungs[2] or 0),
        float(ends[1]),
        float(ends[2]),
        cells[5],
    )


def gaps_of(prediction: Prediction, rows: Sequence[Row]) -> list[float]:
    """The predicted gap of each seed that has all of the runs."""
    by_key = {row.key: row for row in rows if row.status != DIVERGED}

    def gap(seed: int, rung: int) -> float:
        arm = by_key.get((prediction.arm, seed, rung))
        base = by_key.get((prediction.against, seed, rung))
        if arm is None or base is None:
            return math.nan
        own, reference = (getattr(row, f"{prediction.loss}_loss") for row in (arm, base))
        return gap_percent(own, reference)

    seeds = sorted({row.seed for row in rows})
    gaps = [
        gap(seed, prediction.rung) - (gap(seed, prediction.before) if prediction.before else 0.0)
        for seed in seeds
    ]
    return [g for g in gaps if math.isfinite(g)]


def outcome(prediction: Prediction, rows: Sequence[Row]) -> tuple[Interval, str]:
    """Mean and interval of the predicted gap, and "held", "wrong", "open" or "not run".

    An arm that diverged has a gap without an end: the prediction is held if its range has none.
    """
    mine = [row for row in rows if row.arm == prediction.arm and row.rung == prediction.rung]
    gaps = gaps_of(prediction, rows)
    found = interval(gaps) if gaps else Interval(math.nan, math.nan, math.nan)
    if any(row.status == DIVERGED for row in mine):
        return found, "held" if math.isinf(prediction.high) else "wrong"
    if not gaps:
        return found, "not run"
    if math.isnan(found.low):
        return found, "open"
    if prediction.low <= found.low and found.high <= prediction.high:
        return found, "held"
    return found, "wrong" if found.high < prediction.low or found.low > prediction.high else "open"
