"""The cost of a step without running it: memory, traffic, launches, FLOPs and seconds, on meta tensors."""

from narrowgauge.trainer.simulate.advice import cheaper, fitting
from narrowgauge.trainer.simulate.count import StepCount, StepTotals, Total, count_step
from narrowgauge.trainer.simulate.memory import Memory, MemoryTracker
from narrowgauge.trainer.simulate.memory_estimate import StepEstimate, estimate_memory, estimate_step
from narrowgauge.trainer.simulate.room import Room
from narrowgauge.trainer.simulate.speeds import H200, Speeds
from narrowgauge.trainer.simulate.step import SINGLE
from narrowgauge.trainer.simulate.whole import WholeCount, count_whole

__all__ = [
    "H200",
    "SINGLE",
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
