"""Puts attention and the residual stream of a model under a recipe.

They can be replaced only where the model computes them in modules (`kernels.attention.Attention`,
`kernels.residual.Residual`). Other models use plain functions, which cannot be replaced.
"""

from collections.abc import Mapping

import torch

from narrowgauge.kernels.attention import Attention
from narrowgauge.kernels.residual import Residual
from narrowgauge.nn.transformer.attention import NarrowAttention
from narrowgauge.nn.transformer.residual import NarrowResidual
from narrowgauge.recipes import Recipe
from narrowgauge.system.errors import UserError


def refuse_unreachable(model: torch.nn.Module, recipe: Recipe) -> None:
    """Refuse a recipe that narrows a place that the model does not expose as a module."""
    kinds = {type(module) for module in model.modules()}
    if recipe.narrows_attention and not any(issubclass(kind, Attention) for kind in kinds):
        raise UserError(
            f"recipe {recipe.name!r} narrows attention, and {type(model).__name__} computes its attention "
            "where no recipe reaches it (only narrowgauge's own model has these places); leave it wide: "
            f"narrowgauge.recipe({recipe.name!r}).with_places({{'attention': {recipe.compute!r}}})"
        )
    if recipe.stream.name != "fp32" and not any(issubclass(kind, Residual) for kind in kinds):
        raise UserError(
            f"recipe {recipe.name!r} keeps the residual stream in {recipe.stream.name!r}, and "
            f"{type(model).__name__} adds to it where no recipe reaches it (only narrowgauge's own model has "
            f"this place); take narrowgauge.recipe({recipe.name!r}).with_places({{'stream': 'fp32'}})"
        )


def replace_places(model: torch.nn.Module, recipe: Recipe, resolved: Mapping[str, Recipe]) -> None:
    """Make every attention and every point of the stream compute under a recipe, in place.

    Args:
        model: The model; modules that are already under a recipe change to the new one.
        recipe: The recipe of the model.
        resolved: The recipe of each attention by its name.
    """

    def attention(name: str, index: int) -> Attention:
        part = resolved[name]
        return NarrowAttention(part, index) if part.narrows_attention else Attention()

    def residual(name: str, index: int) -> Residual:
        return Residual() if recipe.stream.name == "fp32" else NarrowResidual(recipe, index)

    for kind, make in ((Attention, attention), (Residual, residual)):
        found = [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]
        for index, (name, old) in enumerate(found):
            new = make(name, index)
            if not (type(old) is type(new) is kind):  # a plain one stays the same object
                put(model, name, new.train(old.training))


def put(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    """Replace the module with a given name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
