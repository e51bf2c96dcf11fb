"""How does a run go? The configuration, the loop, the run directory, validation."""

from narrowgauge.training.config import Config, config_keys, load_values, make_config, to_toml
from narrowgauge.training.loop import Diverged, OutOfMemory, Preempted, default_out, run
from narrowgauge.training.use import TrainedRun, open_run
from narrowgauge.training.validate import bits_per_byte, validation_loss

__all__ = [
    "Config",
    "Diverged",
    "OutOfMemory",
    "Preempted",
    "TrainedRun",
    "bits_per_byte",
    "config_keys",
    "default_out",
    "load_values",
    "make_config",
    "open_run",
    "run",
    "to_toml",
    "validation_loss",
]
