"""The configuration of a run, and one training step."""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.guard import Diverged as Diverged
    from narrowgauge.trainer.training.config.config import Config as Config
    from narrowgauge.trainer.training.config.config import config_keys as config_keys
    from narrowgauge.trainer.training.config.config import load_values as load_values
    from narrowgauge.trainer.training.config.config import make_config as make_config
    from narrowgauge.trainer.training.config.diff import to_toml as to_toml
    from narrowgauge.trainer.training.config.synonyms import Key as Key
    from narrowgauge.trainer.training.step.step_faults import Corrupted as Corrupted
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)
