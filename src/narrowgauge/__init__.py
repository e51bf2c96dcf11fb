"""narrowgauge: pre-train language models in narrow numbers, and see what the narrow numbers did.

Every tensor of a training step has a place; a recipe says which number format each place is in.
"""

from narrowgauge.formats import Format, format, format_names, round_to
from narrowgauge.nn import convert
from narrowgauge.optim import AdamW, Muon, parameter_groups
from narrowgauge.quantization import QTensor, quantize
from narrowgauge.recipes import Recipe, load_recipe, recipe, recipe_names
from narrowgauge.training import run

__all__ = [
    "AdamW",
    "Format",
    "Muon",
    "QTensor",
    "Recipe",
    "convert",
    "format",
    "format_names",
    "load_recipe",
    "parameter_groups",
    "quantize",
    "recipe",
    "recipe_names",
    "round_to",
    "run",
]
