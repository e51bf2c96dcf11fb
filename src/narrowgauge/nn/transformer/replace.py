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
    """Refuse a recipe that narrows a place that the model does not expose as a module.

    Raises:
        UserError: It narrows attention or the stream, and the model has no such place.
    """
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
    attentions = {name: m for name, m in model.named_modules() if isinstance(m, Attention)}
    for index, (name, attention) in enumerate(attentions.items()):
        of_layer = resolved[name]
        new = NarrowAttention(of_layer, index) if of_layer.narrows_attention else Attention()
        _put_unless_plain(model, name, attention, new)
    points = {name: m for name, m in model.named_modules() if isinstance(m, Residual)}
    for index, (name, point) in enumerate(points.items()):
        _put_unless_plain(
            model, name, point, Residual() if recipe.stream.name == "fp32" else NarrowResidual(recipe, index)
        )


def _put_unless_plain(model: torch.nn.Module, name: str, old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Replace a module by another, unless both are the plain ones."""
    if type(old) is type(new) and type(new) in (Attention, Residual):
        return
    put(model, name, new.train(old.training))


def put(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    """Replace the module with a given name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
