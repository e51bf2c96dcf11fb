"""Replaces a model of many blocks by models of few: the cost of a step is linear in the blocks of each kind.

A group is `recompute_every` blocks, of which the first is recomputed; without recomputation it is one block.
Two groups are of the same kind if the recipe's rules select the same layers of both, and of the groups before
them as well, since a block passes its last sum to the next one.
"""

from collections import Counter
from collections.abc import Hashable
from itertools import pairwise

import numpy as np
import torch

from narrowgauge.recipes import matches
from narrowgauge.trainer.models import Transformer
from narrowgauge.trainer.training.config.config import Config


def with_layers(config: Config, layers: int) -> Config:
    """The configuration with another number of blocks."""
    return config.model_copy(update={"model": config.model.model_copy(update={"layers": layers})})


def has_equal_blocks(config: Config) -> bool:
    """Whether the recipe's rules select the same layers of all blocks."""
    layers = config.spec.model.layers
    return len(set(_blocks(config, layers, _named(config)))) == 1


def few_blocks(config: Config) -> list[tuple[int, float]]:
    """Numbers of blocks, and the weight of each such model; the sum has the groups of each kind.

    The models have two groups, three, and, for each further kind, the smallest number that adds one of it;
    plus the blocks of the last group if it is not full. The result is the model itself, with weight 1, if the
    others together have more blocks or a kind occurs in no smaller model.
    """
    layers, unit, named = config.spec.model.layers, _unit(config), _named(config)
    whole = _groups(config, layers, named)
    wanted = list(whole.values())
    chosen: list[int] = []
    columns: list[list[int]] = []
    for n in range(layers % unit + 2 * unit, layers, unit):
        if sum(chosen) + n > layers:
            break
        groups = _groups(config, n, named)
        if not groups.keys() <= whole.keys():
            continue  # a kind that the model does not have
        column = [groups[kind] for kind in whole]
        weights, _, rank, _ = np.linalg.lstsq(np.array([*columns, column]).T, wanted)
        if rank > len(chosen):  # it adds information
            chosen.append(n)
            columns.append(column)
            if np.allclose(np.array(columns).T @ weights, wanted):
                return [(n, float(w)) for n, w in zip(chosen, weights, strict=True)]
    return [(layers, 1.0)]


def _groups(config: Config, layers: int, named: list[Hashable]) -> Counter[Hashable]:
    """The number of groups of each kind in a model of `layers` blocks."""
    blocks, unit = _blocks(config, layers, named), _unit(config)
    groups = [tuple(blocks[begin : begin + unit]) for begin in range(0, layers, unit)]
    return Counter(pairwise([None, *groups]))


def _blocks(config: Config, layers: int, named: list[Hashable]) -> list[Hashable]:
    """What rules select of each block in a model of `layers` blocks: layers by name, blocks by position."""
    rules = config.spec.recipe.rules
    return [(named[b], tuple(rule.selects("", b, layers) for rule in rules)) for b in range(layers)]


def _named(config: Config) -> list[Hashable]:
    """For each block, the layers that rules select by name: (index of the rule, name within the block)."""
    with torch.device("meta"):
        one = Transformer(with_layers(config, 1).spec.model).get_submodule("blocks.0")
    names = [name for name, _ in one.named_modules()]
    patterns = [(i, p) for i, rule in enumerate(config.spec.recipe.rules) for p in rule.modules]
    return [
        frozenset((i, name) for i, p in patterns for name in names if matches(f"blocks.{block}.{name}", p))
        for block in range(config.spec.model.layers)
    ]


def _unit(config: Config) -> int:
    return config.training.recompute_every if config.training.recompute else 1
