"""torchao's two functions for float8 training, for any recipe: a script changes one import.

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training                    before
    from narrowgauge.integrations.torchao import Float8LinearConfig, convert_to_float8_training  after

Signatures match torchao 0.18, which need not be installed. Its recipe names select the equivalent
recipes: all layers that pass the filter are converted, the others are unchanged.

    tensorwise            fp8
    rowwise               fp8-row
    rowwise_with_gw_hp    fp8-row-hp

For one of narrowgauge's names (`nvfp4`) or the path of a recipe file, the recipe's `keep` applies as well.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from narrowgauge.nn import Linear
from narrowgauge.nn.convert import apply_plan, plan_of
from narrowgauge.nn.transformer.outline import warn_of_left
from narrowgauge.recipes import Recipe
from narrowgauge.recipes import recipe as recipe_named
from narrowgauge.system.errors import UserError


class Float8LinearRecipeName(enum.Enum):
    """torchao's recipe names."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


OURS = {"tensorwise": "fp8", "rowwise": "fp8-row", "rowwise_with_gw_hp": "fp8-row-hp"}


@dataclass(frozen=True)
class Float8LinearConfig:
    """The recipe of a conversion, and torchao's switches.

    Attributes:
        recipe: A name of torchao's or narrowgauge's, or the path of a recipe file.
        enable_fsdp_float8_all_gather: Not supported; see `__post_init__`.
        pad_inner_dim: Accepted; inner dimensions of GEMMs are padded where necessary in any case.
        emulate: Whether to compute in emulation even if the hardware has the formats.
    """

    recipe: str = "tensorwise"
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UserError: The recipe is unknown, or torchao's float8 all-gather is requested.
        """
        recipe_named(OURS.get(self.recipe, self.recipe))
        if self.enable_fsdp_float8_all_gather:
            raise UserError(
                "enable_fsdp_float8_all_gather needs weights of torchao's class: leave it out and call "
                "narrowgauge.fully_shard in place of fully_shard, which sends the weights of fp8, mxfp8 "
                "and others in their 8 bits"
            )

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> "Float8LinearConfig":
        """The configuration of a recipe.

        Args:
            recipe_name: A name of torchao's (a string, its enum or ours) or narrowgauge's, or a path.

        Raises:
            UserError: The recipe is unknown.
        """
        value = recipe_name.value if isinstance(recipe_name, enum.Enum) else recipe_name
        return Float8LinearConfig(recipe=str(value))


class Float8NarrowLinear(Linear):
    """A `narrowgauge.nn.Linear` with Float8 in its name, by which scripts recognize converted layers."""


def convert_to_float8_training(
    module: torch.nn.Module,
    *,
    config: Float8LinearConfig | None = None,
    module_filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
) -> torch.nn.Module:
    """Convert the `torch.nn.Linear`s of a module to a recipe.

    Args:
        module: Any module; changed in place.
        config: The recipe; None for torchao's default, "tensorwise".
        module_filter_fn: Called with each Linear and its full name; returns False to leave the module
            unchanged. None converts all.

    Returns:
        The module itself.

    Raises:
        UserError: `config` is torchao's class, the filter excludes every layer, or `narrowgauge.convert`
            refuses.
    """
    config = Float8LinearConfig() if config is None else config
    if not hasattr(config, "recipe"):  # a class of the same name
        raise UserError(
            f"the config is a {type(config).__module__}.{type(config).__name__}, which does not name a "
            "recipe: import Float8LinearConfig from narrowgauge.integrations.torchao as well"
        )
    places = dict(module.named_modules(remove_duplicate=False))
    linears = {name: m for name, m in places.items() if isinstance(m, torch.nn.Linear)}
    left_out = [n for n, m in linears.items() if module_filter_fn and not module_filter_fn(m, n)]
    if len(left_out) == len(linears):
        raise UserError(
            f"module_filter_fn leaves none of {len(linears)} linear layers of {type(module).__name__} to "
            "convert: let it return True for the layers to be narrow"
        )
    plan = plan_of(module, _recipe(config.recipe), left_out=left_out)
    apply_plan(module, plan, "emulated" if config.emulate else "auto")
    warn_of_left(module)
    for made in module.modules():
        if type(made) is Linear and made.recipe.is_narrow:
            made.__class__ = Float8NarrowLinear
    return module


def _recipe(name: str) -> Recipe:
    """A recipe; torchao's recipes keep no layer wide, since the filter decides that."""
    recipe = recipe_named(OURS.get(name, name))
    if name not in OURS:
        return recipe
    return replace(recipe, rules=tuple(rule for rule in recipe.rules if not rule.keeps_state))
