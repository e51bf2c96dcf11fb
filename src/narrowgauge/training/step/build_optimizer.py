"""A run's optimizer, made from its configuration: parameter groups, random bits, learning rate."""

from dataclasses import replace
from typing import Any

import torch

from narrowgauge.models import Transformer
from narrowgauge.nn import outline_of
from narrowgauge.optim import AdamW, Muon, Optimizer, learning_rate, parameter_groups
from narrowgauge.optim.optimizer import is_large
from narrowgauge.quantization import ensure_state
from narrowgauge.recipes import Recipe, resolve
from narrowgauge.training.config.config import Config


def build_optimizer(config: Config, model: torch.nn.Module) -> Optimizer:
    """Make the configuration's optimizer of a model, before its first step."""
    o, groups, seed = config.optimizer, _groups(config, model), config.training.seed
    recipe = replace(config.spec.recipe, rules=())
    optimizer: Optimizer
    if o.name == "muon":
        optimizer = Muon(groups, recipe, momentum=o.momentum, betas=o.betas, eps=o.eps, seed=seed)
    else:
        optimizer = AdamW(groups, recipe, betas=o.betas, eps=o.eps, seed=seed)
    if any(rule.state for rule in config.spec.recipe.rules):
        _follow_rules(optimizer, config.spec.recipe, model)
    return optimizer


def _follow_rules(optimizer: Optimizer, recipe: Recipe, model: torch.nn.Module) -> None:
    """Keep moments as the recipe's rules say for the module of each parameter."""
    plan = resolve(recipe, outline_of(model))
    for name, p in model.named_parameters():
        casts = plan.moments_of(name.rpartition(".")[0])
        for place, moment in optimizer.moments(p).items():
            if place in casts and moment.cast != casts[place] and is_large(p):
                optimizer.recast(p, place, casts[place])


def number_parameters(config: Config, model: torch.nn.Module) -> None:
    """Set the index of each local parameter among all of the full model's; its random bits depend on it."""
    with torch.device("meta"):
        full_model = Transformer(config.spec.model)
    parameters = (p for group in _groups(config, full_model) for p in group["params"])
    indices = {p: i for i, p in enumerate(parameters)}
    of_name = {name: indices[p] for name, p in full_model.named_parameters()}
    for name, parameter in model.named_parameters():
        ensure_state(parameter).index = of_name[name]


def learning_rate_of(config: Config, step: int) -> float:
    """The learning rate of an optimizer step, counted from 1."""
    s = config.schedule
    return learning_rate(
        step,
        lr=config.optimizer.lr,
        steps=config.training.steps,
        kind=s.kind,
        warmup_steps=s.warmup_steps,
        final_lr_fraction=s.final_lr_fraction,
        decay_fraction=s.decay_fraction,
        decay_steps=s.decay_steps,
    )


def _groups(config: Config, model: torch.nn.Module) -> list[dict[str, Any]]:
    o = config.optimizer
    return parameter_groups(model, o.weight_decay, o.groups, muon=o.name == "muon")
