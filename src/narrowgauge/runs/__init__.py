"""How does a run go? The loop, the run directory, validation, and what is done with a finished run."""

from narrowgauge.runs.loop.default_out import default_out
from narrowgauge.runs.loop.loop import OutOfMemory
from narrowgauge.runs.loop.parallel_dims import Layout, lay_out, parallel_dims_of
from narrowgauge.runs.loop.run import run
from narrowgauge.runs.loop.validation import bits_per_byte, validation_loss
from narrowgauge.runs.monitor.hardware import choose_device
from narrowgauge.runs.monitor.profiler import STEPS as PROFILED
from narrowgauge.runs.use.branch import branch_run
from narrowgauge.runs.use.convert import convert_run
from narrowgauge.runs.use.trained_model import TrainedRun, open_run

__all__ = [
    "PROFILED",
    "Layout",
    "OutOfMemory",
    "TrainedRun",
    "bits_per_byte",
    "branch_run",
    "choose_device",
    "convert_run",
    "default_out",
    "lay_out",
    "open_run",
    "parallel_dims_of",
    "run",
    "validation_loss",
]
