"""What is one training step? The configuration and the step itself."""

from narrowgauge.guard import Diverged
from narrowgauge.training.config.config import Config, config_keys, load_values, make_config
from narrowgauge.training.config.diff import to_toml
from narrowgauge.training.config.keys import Key
from narrowgauge.training.step.replica_check import Corrupted

__all__ = ["Config", "Corrupted", "Diverged", "Key", "config_keys", "load_values", "make_config", "to_toml"]
