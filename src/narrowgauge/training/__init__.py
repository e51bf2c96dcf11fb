"""How does a run go? The configuration, the loop, the run directory, validation."""

from narrowgauge.training.config.config import Config, config_keys, load_values, make_config, to_toml
from narrowgauge.training.config.keys import Key
from narrowgauge.training.monitor.hardware import choose_device
from narrowgauge.training.monitor.memory import Memory
from narrowgauge.training.monitor.memory_advice import cheaper
from narrowgauge.training.monitor.memory_estimate import StepEstimate, estimate_memory, estimate_step
from narrowgauge.training.monitor.profiler import STEPS as PROFILED
from narrowgauge.training.run.default_out import default_out
from narrowgauge.training.run.loop import OutOfMemory
from narrowgauge.training.run.parallel_dims import Layout, lay_out, parallel_dims_of
from narrowgauge.training.run.run import run
from narrowgauge.training.run.validation import bits_per_byte, validation_loss
from narrowgauge.training.step.guard import Diverged
from narrowgauge.training.step.replica_check import Corrupted
from narrowgauge.training.use.branch import branch_run
from narrowgauge.training.use.convert import convert_run
from narrowgauge.training.use.trained_model import TrainedRun, open_run

__all__ = [
    "PROFILED",
    "Config",
    "Corrupted",
    "Diverged",
    "Key",
    "Layout",
    "Memory",
    "OutOfMemory",
    "StepEstimate",
    "TrainedRun",
    "bits_per_byte",
    "branch_run",
    "cheaper",
    "choose_device",
    "config_keys",
    "convert_run",
    "default_out",
    "estimate_memory",
    "estimate_step",
    "lay_out",
    "load_values",
    "make_config",
    "open_run",
    "parallel_dims_of",
    "run",
    "to_toml",
    "validation_loss",
]
