"""Which format is each place in? Recipes as TOML data, and which code runs them."""

from narrowgauge.devices import Device
from narrowgauge.recipes.attention_places import (
    ATTENTION_PLACES,
    ATTENTION_PRODUCTS,
    GRADIENT_PLACES,
    is_wide,
)
from narrowgauge.recipes.attention_shapes import require_attention_shapes
from narrowgauge.recipes.backend import BACKENDS, SCHEMES, Backend, Product, choose_backend, products_on
from narrowgauge.recipes.capability import device_facts, named_device
from narrowgauge.recipes.cut_blocks import cut_blocks
from narrowgauge.recipes.outline import HEAD, Names, Outline, kept_text, nearest, require_matches
from narrowgauge.recipes.parse import RECIPE_KEYS, parse_recipe
from narrowgauge.recipes.places import (
    CAST_TABLE,
    DIMENSIONS,
    GEMM_PLACES,
    GEMMS,
    GROUPS,
    KEYS,
    OFFLOADABLE,
    PLACES,
    STATE_PLACES,
    WIRE_PLACES,
)
from narrowgauge.recipes.recipe import ROUTER, Recipe
from narrowgauge.recipes.registry import load_recipe, recipe, recipe_names
from narrowgauge.recipes.rule import Rule, matches

__all__ = [
    "ATTENTION_PLACES",
    "ATTENTION_PRODUCTS",
    "BACKENDS",
    "CAST_TABLE",
    "DIMENSIONS",
    "GEMMS",
    "GEMM_PLACES",
    "GRADIENT_PLACES",
    "GROUPS",
    "HEAD",
    "KEYS",
    "OFFLOADABLE",
    "PLACES",
    "RECIPE_KEYS",
    "ROUTER",
    "SCHEMES",
    "STATE_PLACES",
    "WIRE_PLACES",
    "Backend",
    "Device",
    "Names",
    "Outline",
    "Product",
    "Recipe",
    "Rule",
    "choose_backend",
    "cut_blocks",
    "device_facts",
    "is_wide",
    "kept_text",
    "load_recipe",
    "matches",
    "named_device",
    "nearest",
    "parse_recipe",
    "products_on",
    "recipe",
    "recipe_names",
    "require_attention_shapes",
    "require_matches",
]
