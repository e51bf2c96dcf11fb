"""Which format is each place in? Recipes as TOML data, and which code runs them."""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.recipes.backend import BACKENDS as BACKENDS
    from narrowgauge.recipes.backend import Backend as Backend
    from narrowgauge.recipes.backend import choose_backend as choose_backend
    from narrowgauge.recipes.backend import device_facts as device_facts
    from narrowgauge.recipes.backend import named_device as named_device
    from narrowgauge.recipes.backend import products_on as products_on
    from narrowgauge.recipes.parse import RECIPE_KEYS as RECIPE_KEYS
    from narrowgauge.recipes.places import CAST_TABLE as CAST_TABLE
    from narrowgauge.recipes.places import GEMM_PLACES as GEMM_PLACES
    from narrowgauge.recipes.places import GEMMS as GEMMS
    from narrowgauge.recipes.places import GRADIENT_PLACES as GRADIENT_PLACES
    from narrowgauge.recipes.places import GROUPS as GROUPS
    from narrowgauge.recipes.places import KEYS as KEYS
    from narrowgauge.recipes.places import OFFLOADABLE as OFFLOADABLE
    from narrowgauge.recipes.places import STATE_PLACES as STATE_PLACES
    from narrowgauge.recipes.places import Rule as Rule
    from narrowgauge.recipes.places import is_wide as is_wide
    from narrowgauge.recipes.places import matches as matches
    from narrowgauge.recipes.recipe import Recipe as Recipe
    from narrowgauge.recipes.recipe import RecipeLike as RecipeLike
    from narrowgauge.recipes.recipe_rules import ATTENTION_PRODUCTS as ATTENTION_PRODUCTS
    from narrowgauge.recipes.registry import comment as comment
    from narrowgauge.recipes.registry import differs as differs
    from narrowgauge.recipes.registry import load_recipe as load_recipe
    from narrowgauge.recipes.registry import parse_recipe as parse_recipe
    from narrowgauge.recipes.registry import recipe as recipe
    from narrowgauge.recipes.registry import recipe_list as recipe_list
    from narrowgauge.recipes.registry import recipe_names as recipe_names
    from narrowgauge.recipes.resolve import HEAD as HEAD
    from narrowgauge.recipes.resolve import ModelPlan as ModelPlan
    from narrowgauge.recipes.resolve import Names as Names
    from narrowgauge.recipes.resolve import Outline as Outline
    from narrowgauge.recipes.resolve import cut_blocks as cut_blocks
    from narrowgauge.recipes.resolve import kept_text as kept_text
    from narrowgauge.recipes.resolve import nearest as nearest
    from narrowgauge.recipes.resolve import require_attention_shapes as require_attention_shapes
    from narrowgauge.recipes.resolve import require_matches as require_matches
    from narrowgauge.recipes.resolve import resolve as resolve
    from narrowgauge.system.devices import Device as Device
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)
