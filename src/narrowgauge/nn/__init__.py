"""How does a layer compute under a recipe? `Linear` (three GEMMs) and `convert(model, recipe)`."""

from narrowgauge.nn.convert import convert, forget_step, recipe_tensors, set_step
from narrowgauge.nn.linear import DTYPES, Linear
from narrowgauge.nn.observer import Gauges, Onlooker
from narrowgauge.nn.sharded.layout import Split, Tokens
from narrowgauge.nn.weight_state import best_numbers

__all__ = [
    "DTYPES",
    "Gauges",
    "Linear",
    "Onlooker",
    "Split",
    "Tokens",
    "best_numbers",
    "convert",
    "forget_step",
    "recipe_tensors",
    "set_step",
]
