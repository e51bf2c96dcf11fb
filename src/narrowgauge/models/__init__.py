"""What are we training? One decoder-only transformer, its named sizes; knows nothing of recipes."""

from narrowgauge.kernels.cross_entropy import IGNORED, cross_entropy, objective_of
from narrowgauge.models.config import ModelConfig
from narrowgauge.models.count import count_block_weights, count_parameters, flops_per_token
from narrowgauge.models.experts import Expert, experts_of
from narrowgauge.models.generate import generate
from narrowgauge.models.initial_weights import initialize, starting_values
from narrowgauge.models.kv_cache import KVCache
from narrowgauge.models.sizes import model_config, model_names
from narrowgauge.models.transformer import Transformer

__all__ = [
    "IGNORED",
    "Expert",
    "KVCache",
    "ModelConfig",
    "Transformer",
    "count_block_weights",
    "count_parameters",
    "cross_entropy",
    "experts_of",
    "flops_per_token",
    "generate",
    "initialize",
    "model_config",
    "model_names",
    "objective_of",
    "starting_values",
]
