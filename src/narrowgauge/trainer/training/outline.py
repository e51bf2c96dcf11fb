"""The outline of a configuration's model, derived from one of its blocks, since all are built alike."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from narrowgauge.recipes import HEAD, Names, Outline, Recipe, cut_blocks, kept_text, require_matches, resolve
from narrowgauge.trainer.models import ModelConfig


@lru_cache(maxsize=8)
def outline_of_model(model: ModelConfig) -> Outline:
    """The outline of the full model, whichever part of it a process holds."""
    import torch  # here: the keys of a configuration are listed without torch

    from narrowgauge.nn import outline_of
    from narrowgauge.trainer.models import Transformer

    with torch.device("meta"):
        one = outline_of(Transformer(replace(model, layers=1)))
    shapes = {name: one.shapes[first] for first in one.layers for name in _names(first, model.layers)}
    blocks = [f"blocks.{number}" for number in range(model.layers)]
    return Outline(
        _all(one.layers, model.layers),
        shapes,
        blocks,
        _all(one.attention, model.layers),
        _all(one.owners, model.layers),
    )


def require_layers(recipe: Recipe, model: ModelConfig) -> None:
    """Refuse a recipe with a rule that matches no layer of a model (`recipes.require_matches`).

    Every model of a configuration has a head and blocks, so most recipes can be checked without the list of
    its layers, which is long for a model of very many blocks.

    Raises:
        UserError: A rule matches no layer.
    """
    if any(rule.modules and HEAD not in rule.modules for rule in recipe.rules):
        require_matches(recipe, outline_of_model(model))


def _all(names: Names, layers: int) -> Names:
    """The modules of all blocks, from the modules of one."""
    return {
        name: [(_in_block(n, number), None if block is None else number) for n, block in each]
        for first, each in names.items()
        for number, name in enumerate(_names(first, layers))
    }


def _names(first: str, layers: int) -> Iterator[str]:
    """The name of a module in every block, in order; unchanged outside blocks."""
    return iter(dict.fromkeys(_in_block(first, number) for number in range(layers)))


def _in_block(name: str, number: int) -> str:
    return re.sub(r"^blocks\.0(?=\.|$)", f"blocks.{number}", name)


def placement(model: ModelConfig, recipe: Recipe, tokens: int) -> list[str]:
    """Sentences on layers that stay wide, blocks that `tokens` cut, and rows that an export would refuse."""
    from narrowgauge.trainer.checkpoint.interop.quantized_export import unfit_plan

    plan = resolve(recipe, outline_of_model(model))
    return [line for line in (kept_text(plan), *cut_blocks(plan, tokens), unfit_plan(model, plan)) if line]
