"""The linear layers of a model under its recipe, each with its casts, made once where many are equal."""

from dataclasses import replace

import torch

from narrowgauge.distributed import ModelSpec
from narrowgauge.models import ModelConfig
from narrowgauge.recipes import Recipe, matches
from narrowgauge.training.step.build_model import build_model


def linear_layers(spec: ModelSpec) -> list[tuple[str, torch.nn.Linear]]:
    """The linear layers of a model, each with its name.

    Where the recipe treats all experts of a block alike, the first one's layers stand there once for each.
    """
    model = spec.model
    if not (model.experts and treats_experts_alike(model, spec.recipe)):
        return _layers(spec)
    layers = _layers(replace(spec, model=replace(model, experts=model.experts_per_token)))
    for name, layer in layers:
        if name.endswith(".router"):  # it was made for those few
            layer.out_features = model.experts
    return [
        (name, layer)
        for name, layer in layers
        if not is_of_expert(name) or ".experts.0." in name
        for _ in range(model.experts if is_of_expert(name) else 1)
    ]


def _layers(spec: ModelSpec) -> list[tuple[str, torch.nn.Linear]]:
    modules = build_model(spec, torch.device("meta")).named_modules()
    return [(name, module) for name, module in modules if isinstance(module, torch.nn.Linear)]


def treats_experts_alike(model: ModelConfig, recipe: Recipe) -> bool:
    """Whether no rule of a recipe selects some experts of a block, and not others."""
    patterns = {pattern for rule in recipe.rules for pattern in rule.modules}
    layers = [f"blocks.{i}.experts.{{}}.{name}" for i in range(model.layers) for name in _OF_EXPERT]
    return all(
        len({matches(layer.format(number), pattern) for number in range(model.experts)}) == 1
        for layer in layers
        for pattern in patterns
    )


_OF_EXPERT = ("gate_up", "up", "down")


def tokens_of(layer: str, model: ModelConfig, tokens: int) -> int:
    """The tokens that a layer sees of so many, if all experts of a block have equally many."""
    return -(-tokens * model.experts_per_token // model.experts) if is_of_expert(layer) else tokens


def is_of_expert(layer: str) -> bool:
    """Whether a layer is part of an expert."""
    return ".experts." in layer and not layer.endswith(".router")
