"""What are we training? One decoder-only transformer, its named sizes; knows nothing of recipes."""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.kernels.cross_entropy import IGNORED as IGNORED
    from narrowgauge.kernels.cross_entropy import cross_entropy as cross_entropy
    from narrowgauge.kernels.cross_entropy import objective_of as objective_of
    from narrowgauge.trainer.models.config import ModelConfig as ModelConfig
    from narrowgauge.trainer.models.count import count_block_weights as count_block_weights
    from narrowgauge.trainer.models.count import count_parameters as count_parameters
    from narrowgauge.trainer.models.count import flops_per_token as flops_per_token
    from narrowgauge.trainer.models.experts import Expert as Expert
    from narrowgauge.trainer.models.experts import experts_of as experts_of
    from narrowgauge.trainer.models.generate import generate as generate
    from narrowgauge.trainer.models.initial_weights import initialize as initialize
    from narrowgauge.trainer.models.initial_weights import starting_values as starting_values
    from narrowgauge.trainer.models.kv_cache import KVCache as KVCache
    from narrowgauge.trainer.models.sizes import model_config as model_config
    from narrowgauge.trainer.models.sizes import model_names as model_names
    from narrowgauge.trainer.models.transformer import Transformer as Transformer
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)
