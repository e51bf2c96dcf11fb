"""Put a model under a recipe: every linear layer is replaced by one that computes as the recipe says."""

import math
from collections.abc import Sequence
from fnmatch import fnmatch

import torch

from narrowgauge.errors import UserError
from narrowgauge.nn.linear import Linear
from narrowgauge.recipes import Recipe
from narrowgauge.recipes import recipe as recipe_named


def convert(model: torch.nn.Module, recipe: str | Recipe, keep: Sequence[str] = ()) -> torch.nn.Module:
    """Make the Linears of any module compute under a recipe; parameters stay the same objects.

    Args:
        model: any module with `torch.nn.Linear`s, or Hugging Face `Conv1D`s (GPT-2); changed in place.
        recipe: a recipe, its name, or the path of its TOML file.
        keep: names or patterns of further modules that stay in the recipe's `compute` format, beside those
            the recipe itself keeps. A pattern is compared with the whole name and with its last component.

    Returns:
        The model (a new module only if the model itself is a Linear).

    Raises:
        UserError: no linear layer in the model, or a `keep` pattern that matches none.
    """
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    layers = {name: m for name, m in model.named_modules() if _is_linear(m)}
    if not layers:
        raise UserError(
            f"no torch.nn.Linear in {type(model).__name__}: a recipe has nothing to act on; "
            "convert the module that holds the linear layers"
        )
    for pattern in keep:
        if not any(_matches(name, pattern) for name in layers):
            raise UserError(
                f"keep={pattern!r} matches no linear layer; use a name or pattern such as "
                f"{next(reversed(layers))!r}, or '*.{next(reversed(layers)).split('.')[-1]}'"
            )
    kept = kept_layers(model, recipe, list(layers), keep)
    for index, (name, layer) in enumerate(layers.items()):
        of_layer = recipe.in_high_precision() if name in kept else recipe
        converted = Linear(layer, of_layer, index, transposed=type(layer).__name__ == "Conv1D")
        converted.train(layer.training)
        if not name:
            return converted
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, converted)
    return model


def kept_layers(
    model: torch.nn.Module, recipe: Recipe, names: Sequence[str], keep: Sequence[str] = ()
) -> set[str]:
    """The names of linear layers that stay out: by pattern, and the recipe's share of last blocks."""
    patterns = [*recipe.keep_modules, *keep, *_last_blocks(model, recipe.keep_last_blocks)]
    return {name for name in names if any(_matches(name, p) for p in patterns)}


def set_step(model: torch.nn.Module, seed: int, step: int, first_sample: int) -> None:
    """Tell every converted layer where training is, for the random bits of stochastic places.

    Args:
        model: a converted model.
        seed: the run's seed.
        step: the optimizer step.
        first_sample: place, in the step's global batch, of the first sequence about to be computed.
    """
    for module in model.modules():
        if isinstance(module, Linear) and module.is_stochastic:
            module.driven = True
            module.set_position(seed, step, first_sample)


def _is_linear(module: torch.nn.Module) -> bool:
    kind = type(module)
    is_conv1d = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    return isinstance(module, torch.nn.Linear) or is_conv1d


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) or fnmatch(name.rpartition(".")[2], pattern)


def _last_blocks(model: torch.nn.Module, share: float) -> list[str]:
    """Patterns of the last blocks: those of the longest ModuleList, their number rounded up."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)}
    if not share or not lists:
        return []
    name, blocks = max(lists.items(), key=lambda item: len(item[1]))
    first = len(blocks) - math.ceil(share * len(blocks))
    return [f"{name}.{i}.*" for i in range(first, len(blocks))]
