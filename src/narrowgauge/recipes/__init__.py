"""Which format is each place in? Recipes as TOML data, and which code runs them."""

from narrowgauge.recipes.backend import BACKENDS, Backend, choose_backend
from narrowgauge.recipes.parse import parse_recipe
from narrowgauge.recipes.recipe import FIXED_PLACES, GEMM_PLACES, GEMMS, PLACES, Recipe, Rule, matches
from narrowgauge.recipes.shipped import load_recipe, recipe, recipe_names

__all__ = [
    "BACKENDS",
    "FIXED_PLACES",
    "GEMMS",
    "GEMM_PLACES",
    "PLACES",
    "Backend",
    "Recipe",
    "Rule",
    "choose_backend",
    "load_recipe",
    "matches",
    "parse_recipe",
    "recipe",
    "recipe_names",
]
