"""torchao's two names for float8 training, for any recipe: a script changes one import.

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training                    before
    from narrowgauge.integrations.torchao import Float8LinearConfig, convert_to_float8_training  after

Signatures are torchao's (0.18), and it need not be installed. Its names of recipes mean its recipes: all
layers that the filter lets pass are converted, the others stay the modules they were.

    tensorwise            fp8
    rowwise               fp8-row
    rowwise_with_gw_hp    fp8-row-hp

Under a name of ours (`nvfp4`), or the path of a recipe file, the recipe's own `keep` holds as well.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from narrowgauge.errors import UserError
from narrowgauge.nn import Linear
from narrowgauge.nn.convert import convert_but
from narrowgauge.recipes import Recipe
from narrowgauge.recipes import recipe as recipe_named


class Float8LinearRecipeName(enum.Enum):
    """torchao's names of recipes."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


OURS = {"tensorwise": "fp8", "rowwise": "fp8-row", "rowwise_with_gw_hp": "fp8-row-hp"}


@dataclass(frozen=True)
class Float8LinearConfig:
    """The recipe of a conversion, and torchao's switches.

    Attributes:
        recipe: A name of torchao's or of ours, or the path of a recipe file.
        enable_fsdp_float8_all_gather: Not possible here; see `__post_init__`.
        pad_inner_dim: Accepted; sizes that a product has to have are padded to anyway.
        emulate: Whether to compute in emulation, also where the hardware has the formats.
    """

    recipe: str = "tensorwise"
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        """Refuse what the recipe cannot do.

        Raises:
            UserError: The recipe is unknown, or weights were to be gathered by torchao's means.
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
            recipe_name: A name of torchao's (a string, its enum or ours), a name of ours, or a path.

        Raises:
            UserError: There is no such recipe.
        """
        value = recipe_name.value if isinstance(recipe_name, enum.Enum) else recipe_name
        return Float8LinearConfig(recipe=str(value))


class Float8NarrowLinear(Linear):
    """A `narrowgauge.nn.Linear` whose name has Float8 in it, by which scripts find converted layers."""


def convert_to_float8_training(
    module: torch.nn.Module,
    *,
    config: Float8LinearConfig | None = None,
    module_filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
) -> torch.nn.Module:
    """Make the `torch.nn.Linear`s of a module compute under a recipe.

    Args:
        module: Any module; changed in place.
        config: The recipe; None for torchao's default, "tensorwise".
        module_filter_fn: Called with each Linear and its full name; where it says False, the module stays as
            it is. None converts all.

    Returns:
        The module (a new one only if it is itself a Linear).

    Raises:
        UserError: `config` is torchao's own, the filter leaves no layer, or `narrowgauge.convert` refuses.
    """
    config = Float8LinearConfig() if config is None else config
    if not hasattr(config, "recipe"):  # a class of the same name
        raise UserError(
            f"the config is a {type(config).__module__}.{type(config).__name__}, which says less than a "
            "recipe: import Float8LinearConfig from narrowgauge.integrations.torchao, too"
        )
    places = dict(module.named_modules(remove_duplicate=False))
    linears = {name: m for name, m in places.items() if isinstance(m, torch.nn.Linear)}
    left_out = [n for n, m in linears.items() if module_filter_fn and not module_filter_fn(m, n)]
    if len(left_out) == len(linears):
        raise UserError(
            f"module_filter_fn leaves none of {len(linears)} linear layers of {type(module).__name__} to "
            "convert: let it return True for the layers to be narrow"
        )
    backend = "emulated" if config.emulate else "auto"
    converted = convert_but(module, left_out, _recipe(config.recipe), backend=backend)
    for made in converted.modules():
        if type(made) is Linear and made.recipe.is_narrow:
            made.__class__ = Float8NarrowLinear
    return converted


def _recipe(name: str) -> Recipe:
    """A recipe; one of torchao's keeps no layer wide, which is the filter's matter there."""
    recipe = recipe_named(OURS.get(name, name))
    if name not in OURS:
        return recipe
    return replace(recipe, rules=tuple(rule for rule in recipe.rules if not rule.keeps_state))
