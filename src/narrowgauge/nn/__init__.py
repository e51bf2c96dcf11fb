"""How does a layer compute under a recipe? `Linear` (three GEMMs), attention, `convert(model, recipe)`."""

from narrowgauge.nn.convert import (
    apply_recipe,
    convert,
    discard_step,
    kept_layers,
    recipe_tensors,
    set_step,
    step,
)
from narrowgauge.nn.linear import Linear
from narrowgauge.nn.observer import Gauges, Observation, Observer
from narrowgauge.nn.sharded.linear_shards import EqualShare, LinearShards, PooledSequences
from narrowgauge.nn.stateful_linear import DTYPES
from narrowgauge.nn.step_state import Stepped
from narrowgauge.nn.transformer.attention import NarrowAttention
from narrowgauge.nn.transformer.outline import outline_of
from narrowgauge.nn.transformer.residual import NarrowResidual

__all__ = [
    "DTYPES",
    "EqualShare",
    "Gauges",
    "Linear",
    "LinearShards",
    "NarrowAttention",
    "NarrowResidual",
    "Observation",
    "Observer",
    "PooledSequences",
    "Stepped",
    "apply_recipe",
    "convert",
    "discard_step",
    "kept_layers",
    "outline_of",
    "recipe_tensors",
    "set_step",
    "step",
]
