"""Builds a run's optimizer: its parameter groups and the indices that its random bits depend on."""

from dataclasses import replace
from typing import Any

import torch

from narrowgauge.models import Transformer
from narrowgauge.nn import outline_of
from narrowgauge.optim import AdamW, Muon, Optimizer, parameter_groups
from narrowgauge.quantization import ensure_state
from narrowgauge.quantization.state.parameter_state import is_large
from narrowgauge.recipes import Recipe, resolve
from narrowgauge.training.plan import OptimizerPlan, TrainingPlan


def build_optimizer(plan: TrainingPlan, model: torch.nn.Module) -> Optimizer:
    """The optimizer of a model before its first step."""
    o, groups, seed = plan.optimizer, _groups(plan.optimizer, model), plan.spec.seed_of_rounding
    recipe = replace(plan.spec.recipe, rules=())
    optimizer: Optimizer
    if o.name == "muon":
        optimizer = Muon(groups, recipe, momentum=o.momentum, betas=o.betas, eps=o.eps, seed=seed)
    else:
        optimizer = AdamW(groups, recipe, betas=o.betas, eps=o.eps, seed=seed)
    if any(rule.state for rule in plan.spec.recipe.rules):
        _follow_rules(optimizer, plan.spec.recipe, model)
    return optimizer


def _follow_rules(optimizer: Optimizer, recipe: Recipe, model: torch.nn.Module) -> None:
    """Keep moments in the formats of the recipe's rules for the module of each parameter."""
    plan = resolve(recipe, outline_of(model))
    for name, p in model.named_parameters():
        casts = plan.moments_of(name.rpartition(".")[0])
        for place, moment in optimizer.moments(p).items():
            if place in casts and moment.cast != casts[place] and is_large(p):
                optimizer.recast(p, place, casts[place])


def number_parameters(plan: TrainingPlan, model: torch.nn.Module) -> None:
    """Set the index of each local parameter within the full model; its random bits depend on it."""
    with torch.device("meta"):
        full_model = Transformer(plan.spec.model)
    parameters = (p for group in _groups(plan.optimizer, full_model) for p in group["params"])
    indices = {p: i for i, p in enumerate(parameters)}
    of_name = {name: indices[p] for name, p in full_model.named_parameters()}
    for name, parameter in model.named_parameters():
        ensure_state(parameter).index = of_name[name]


def _groups(o: OptimizerPlan, model: torch.nn.Module) -> list[dict[str, Any]]:
    return parameter_groups(model, o.weight_decay, o.groups, muon=o.name == "muon")
