"""What does a step cost on a GPU that is not here? Launches, bytes, FLOPs, waits and live memory, counted."""

from narrowgauge.bench.count.result import StepCount
from narrowgauge.bench.count.speeds import H200, Speeds
from narrowgauge.bench.count.step import count_step
from narrowgauge.bench.count.table import print_count
from narrowgauge.bench.count.whole import WholeCount, count_whole

__all__ = [
    "H200",
    "Speeds",
    "StepCount",
    "WholeCount",
    "count_step",
    "count_whole",
    "print_count",
]
