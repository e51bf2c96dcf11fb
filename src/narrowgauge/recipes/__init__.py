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
from narrowgauge.recipes.parse import parse_recipe
from narrowgauge.recipes.places import (
    GEMM_PLACES,
    GEMMS,
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
    "GEMMS",
    "GEMM_PLACES",
    "GRADIENT_PLACES",
    "KEYS",
    "OFFLOADABLE",
    "PLACES",
    "ROUTER",
    "SCHEMES",
    "STATE_PLACES",
    "WIRE_PLACES",
    "Backend",
    "Device",
    "Product",
    "Recipe",
    "Rule",
    "choose_backend",
    "device_facts",
    "is_wide",
    "load_recipe",
    "matches",
    "named_device",
    "parse_recipe",
    "products_on",
    "recipe",
    "recipe_names",
    "require_attention_shapes",
]
