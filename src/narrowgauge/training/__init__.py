"""How does a run go? The configuration, the loop, the run directory, validation."""

from narrowgauge.training.config import Config, config_keys, load_values, make_config, to_toml
from narrowgauge.training.convert import convert_run
from narrowgauge.training.corruption import Corrupted
from narrowgauge.training.entry import default_out, run
from narrowgauge.training.expected import Step, cheaper, expected, expected_step
from narrowgauge.training.guard import Diverged
from narrowgauge.training.layout import layout_of
from narrowgauge.training.loop import OutOfMemory
from narrowgauge.training.machine import choose_device
from narrowgauge.training.memory import Memory, gib
from narrowgauge.training.profile import STEPS as PROFILED
from narrowgauge.training.use import TrainedRun, open_run
from narrowgauge.training.validate import bits_per_byte, validation_loss

__all__ = [
    "PROFILED",
    "Config",
    "Corrupted",
    "Diverged",
    "Memory",
    "OutOfMemory",
    "Step",
    "TrainedRun",
    "bits_per_byte",
    "cheaper",
    "choose_device",
    "config_keys",
    "convert_run",
    "default_out",
    "expected",
    "expected_step",
    "gib",
    "layout_of",
    "load_values",
    "make_config",
    "open_run",
    "run",
    "to_toml",
    "validation_loss",
]
