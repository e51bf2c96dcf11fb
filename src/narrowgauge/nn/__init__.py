"""How does a layer compute under a recipe? `Linear` (three GEMMs) and `convert(model, recipe)`."""

from narrowgauge.nn.convert import convert, kept_layers, set_step
from narrowgauge.nn.linear import Linear

__all__ = ["Linear", "convert", "kept_layers", "set_step"]
