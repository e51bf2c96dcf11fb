"""The cost of a step without running it: memory, traffic, launches, FLOPs and seconds, on meta tensors."""

from narrowgauge.simulate.advice import cheaper, fitting
from narrowgauge.simulate.count import StepCount, StepTotals, Total, count_step
from narrowgauge.simulate.memory import Memory, MemoryTracker
from narrowgauge.simulate.memory_estimate import StepEstimate, estimate_memory, estimate_step
from narrowgauge.simulate.room import Room
from narrowgauge.simulate.speeds import H200, Speeds
from narrowgauge.simulate.step import ALONE
from narrowgauge.simulate.whole import WholeCount, count_whole

__all__ = [
    "ALONE",
    "H200",
    "Memory",
    "MemoryTracker",
    "Room",
    "Speeds",
    "StepCount",
    "StepEstimate",
    "StepTotals",
    "Total",
    "WholeCount",
    "cheaper",
    "count_step",
    "count_whole",
    "estimate_memory",
    "estimate_step",
    "fitting",
]
