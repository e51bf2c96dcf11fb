"""The results of an experiment over its rungs as one table."""

import math
from collections.abc import Sequence

from rich.console import Console

from narrowgauge.system.t_interval import Interval
from narrowgauge.system.units import human_count, percent_range, signed_percent
from narrowgauge.trainer.report.table.notes import print_table
from narrowgauge.trainer.report.verdict.gap import NOTHING
from narrowgauge.trainer.report.verdict.rungs import ArmResult

COLUMNS = (
    "arm",
    "tokens",
    "seeds",
    "gap",
    "95 % interval",
    "all arms at once",
    "deviation",
    "bf16 forward",
    "extra tokens",
    "verdict",
)


def percent(value: float, digits: int = 2) -> str:
    """A signed percentage, "-" for NaN.

    >>> percent(0.123), percent(-0.001), percent(float("nan"))
    ('+0.12 %', '0.00 %', '-')
    """
    return NOTHING if math.isnan(value) else signed_percent(value, digits)


def ends(interval: Interval) -> str:
    """Both ends of an interval in percent, "-" for NaN."""
    return NOTHING if math.isnan(interval.low) else percent_range(interval.low, interval.high)


def cells(result: ArmResult) -> list[str]:
    """The texts of a row, by `COLUMNS`."""
    count = str(len(result.gaps)) + (f" + {result.diverged} diverged" if result.diverged else "")
    deviation = percent(result.deviation).removeprefix("+")
    return [
        result.arm,
        human_count(result.tokens),
        count,
        percent(result.gap.mean),
        ends(result.gap),
        ends(result.at_once),
        deviation,
        percent(result.bf16_gap.mean),
        percent(result.extra.mean, 1),
        result.verdict,
    ]


def print_results(results: Sequence[ArmResult], console: Console) -> None:
    """Print the result of each arm and rung."""
    if results:
        print_table([dict(zip(COLUMNS, cells(result), strict=True)) for result in results], console)
