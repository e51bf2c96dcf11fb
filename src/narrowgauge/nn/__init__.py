"""How does a layer compute under a recipe? `Linear` (three GEMMs) and `convert(model, recipe)`."""

from narrowgauge.nn.convert import convert, discard_step, recipe_tensors, set_step, step
from narrowgauge.nn.linear import Linear
from narrowgauge.nn.linear_shards import LinearShards, TokenShard
from narrowgauge.nn.observer import Gauges, Observation, Observer
from narrowgauge.nn.stateful_linear import DTYPES

__all__ = [
    "DTYPES",
    "Gauges",
    "Linear",
    "LinearShards",
    "Observation",
    "Observer",
    "TokenShard",
    "convert",
    "discard_step",
    "recipe_tensors",
    "set_step",
    "step",
]
