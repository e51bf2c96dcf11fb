"""Put a model under a recipe: every linear layer is replaced by one that computes as the recipe says."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgauge.errors import UserError
from narrowgauge.nn.linear import Linear
from narrowgauge.recipes import Recipe
from narrowgauge.recipes import recipe as recipe_named


def convert(model: torch.nn.Module, recipe: str | Recipe, keep: str | Sequence[str] = ()) -> torch.nn.Module:
    """Make the Linears of any module compute under a recipe; parameters stay the same objects.

    Args:
        model: any module with `torch.nn.Linear`s, or Hugging Face `Conv1D`s (GPT-2); changed in place.
        recipe: a recipe, its name, or the path of its TOML file.
        keep: names or patterns of further layers that stay in the recipe's `compute` format, beside those
            the recipe itself keeps. A pattern is compared with the whole name and with its last component.

    Returns:
        The model (a new module only if the model itself is a Linear). A model that is under a recipe already
        goes over to the new one.

    Raises:
        UserError: no linear layer in the model, a `keep` pattern that matches none, or a layer whose weight
            is computed from others (`torch.nn.utils.parametrize`).
    """
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    keep = (keep,) if isinstance(keep, str) else keep
    # A layer that stands in the model twice has two names.
    layers = {name: m for name, m in model.named_modules(remove_duplicate=False) if _is_linear(m)}
    _check(model, layers, keep)
    kept = {layers[name] for name in kept_layers(model, recipe, list(layers), keep)}
    converted: dict[torch.nn.Module, Linear] = {}
    for name, layer in layers.items():
        if layer not in converted:
            of_layer = recipe.in_high_precision() if layer in kept else recipe
            converted[layer] = Linear(layer, of_layer, len(converted), _is_transposed(layer))
            converted[layer].train(layer.training)
        if not name:
            return converted[layer]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, converted[layer])
    return model


def _check(model: torch.nn.Module, layers: dict[str, torch.nn.Module], keep: Sequence[str]) -> None:
    """Refuse what `convert` cannot do, before anything is changed."""
    if not layers:
        raise UserError(
            f"no torch.nn.Linear in {type(model).__name__}: a recipe has nothing to act on; "
            "convert the module that holds the linear layers"
        )
    example = next(reversed(layers))
    for pattern in keep:
        if not any(_matches(name, pattern) for name in layers):
            raise UserError(
                f"keep={pattern!r} matches no linear layer; use a whole name such as {example!r}, its last "
                f"component {example.rpartition('.')[2]!r}, or a pattern such as '*'"
            )
    for name, layer in layers.items():
        if not isinstance(layer.weight, torch.nn.Parameter):
            raise UserError(
                f"the weight of {name or 'the model'} is no parameter but computed from others, which a "
                "recipe cannot see; take the parametrization off first (torch.nn.utils.parametrize)"
            )


def kept_layers(
    model: torch.nn.Module, recipe: Recipe, names: Sequence[str], keep: Sequence[str] = ()
) -> set[str]:
    """The names of linear layers that stay out: by pattern, and the recipe's share of last blocks."""
    patterns = [*recipe.keep_modules, *keep]
    blocks = _last_blocks(model, recipe.keep_last_blocks)
    by_pattern = {name for name in names if any(_matches(name, p) for p in patterns)}
    return by_pattern | {name for name in names if f"{name}.".startswith(blocks)}


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


def _is_conv1d(module: torch.nn.Module) -> bool:
    """Whether this is Hugging Face's linear layer with a (K, N) weight (transformers is never imported)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _is_transposed(layer: torch.nn.Module) -> bool:
    return layer.transposed if isinstance(layer, Linear) else _is_conv1d(layer)


def _is_linear(module: torch.nn.Module) -> bool:
    # The last is a part of MultiheadAttention, which reads its weight and never calls it.
    return _is_conv1d(module) or (
        isinstance(module, torch.nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)
    )


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def _last_blocks(model: torch.nn.Module, share: float) -> tuple[str, ...]:
    """How the names in the last blocks begin: those of the longest ModuleList, their number rounded up."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)}
    if not share or not lists:
        return ()
    name, blocks = max(lists.items(), key=lambda item: len(item[1]))
    count = math.ceil(round(share * len(blocks), 6))  # 0.28 * 25 is 7.000000000000001 in floating point
    prefix = f"{name}." if name else ""
    return tuple(f"{prefix}{i}." for i in range(len(blocks) - count, len(blocks)))
