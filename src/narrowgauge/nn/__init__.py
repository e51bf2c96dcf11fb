"""How does a layer compute under a recipe? `Linear` (three GEMMs) and `convert(model, recipe)`."""

from narrowgauge.nn.convert import convert, recipe_tensors, set_step
from narrowgauge.nn.linear import DTYPES, Linear

__all__ = ["DTYPES", "Linear", "convert", "recipe_tensors", "set_step"]
