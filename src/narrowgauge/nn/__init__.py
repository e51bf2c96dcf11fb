"""How does a layer compute under a recipe? `Linear` (three GEMMs) and `convert(model, recipe)`."""

from narrowgauge.nn.convert import convert, recipe_tensors, set_step
from narrowgauge.nn.gauges import Gauges
from narrowgauge.nn.linear import DTYPES, Linear
from narrowgauge.nn.split import Split, Tokens
from narrowgauge.nn.weights import best_numbers

__all__ = [
    "DTYPES",
    "Gauges",
    "Linear",
    "Split",
    "Tokens",
    "best_numbers",
    "convert",
    "recipe_tensors",
    "set_step",
]
