"""Which format is each place in? Recipes as TOML data, and which code runs them."""

from narrowgauge.recipes.backend import BACKENDS, Backend, choose_backend
from narrowgauge.recipes.recipe import (
    FIXED_PLACES,
    GEMM_PLACES,
    PLACES,
    Recipe,
    load_recipe,
    parse_recipe,
    recipe,
    recipe_names,
)

__all__ = [
    "BACKENDS",
    "FIXED_PLACES",
    "GEMM_PLACES",
    "PLACES",
    "Backend",
    "Recipe",
    "choose_backend",
    "load_recipe",
    "parse_recipe",
    "recipe",
    "recipe_names",
]
