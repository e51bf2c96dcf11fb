"""Put a model under a recipe: every linear layer is replaced by one that computes as the recipe says.

Where a recipe narrows attention or the residual stream, the model's modules for these are replaced, too
(`transformer/replace.py`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgauge.errors import UserError
from narrowgauge.kernels.dropout import Dropout
from narrowgauge.nn.histories import History, end_steps
from narrowgauge.nn.linear import Linear
from narrowgauge.nn.loop_checks import leave_fast_path, refuse_wrapping, require_plain
from narrowgauge.nn.self_test import verified_backend
from narrowgauge.nn.step_state import Stepped
from narrowgauge.nn.transformer.replace import put, refuse_unreachable, replace_places
from narrowgauge.nn.transformer.stacked_experts import (
    ExpertLinear,
    StackedExperts,
    is_stacked,
    require_plain_state,
)
from narrowgauge.nn.transformer.unreached import warn_of_unreached
from narrowgauge.quantization import ParamState
from narrowgauge.recipes import ROUTER, Recipe, matches
from narrowgauge.recipes import recipe as recipe_named

WIDE_WEIGHT = {"weight": "fp32", "master": "none", "grad": "fp32", "gather": "fp32", "reduce": "fp32"}


def convert(
    model: torch.nn.Module, recipe: str | Recipe, keep: str | Sequence[str] = (), backend: str = "auto"
) -> torch.nn.Module:
    """Make the Linears of any module compute under a recipe; parameters stay the same objects.

    Args:
        model: Any module with `torch.nn.Linear`s, or Hugging Face `Conv1D`s (GPT-2); changed in place. The
            experts of transformers' mixtures, stacked in one parameter, are converted, too.
        recipe: A recipe, its name, or the path of its TOML file.
        keep: Names or patterns of layers that stay in the recipe's `compute` format, in addition to those
            that the recipe keeps. A pattern is compared with the full name and with its last component.
        backend: "auto" (native on a device that has the recipe's formats), "native", or "emulated".

    Returns:
        The model (a new module only if the model itself is a Linear). A model that is under a recipe already
        changes to the new one.

    Raises:
        UserError: The model has no linear layer, a `keep` pattern matches none, a weight is computed from
            other tensors (`torch.nn.utils.parametrize`), a layer has tensors beside weight and bias, the
            backend is "native" and the model's device lacks the formats, or the recipe narrows attention or
            the stream and the model has no such place; or the recipe keeps weights in casts and those of
            experts are stacked.

    Warns:
        UserWarning: Some matrices are reached by no recipe, such as those of `torch.nn.MultiheadAttention`;
            or a layer loses a forward pass of its own.
    """
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    leave_fast_path(model)
    keep = (keep,) if isinstance(keep, str) else keep
    # A layer that the model holds twice has two names.
    layers = {name: m for name, m in model.named_modules(remove_duplicate=False) if _is_linear(m)}
    stacks = {name: StackedExperts.of(m) for name, m in model.named_modules() if is_stacked(m)}
    in_stacks = [
        f"{name}.{number}.{layer}" for name, m in stacks.items() for number, layer in m.layer_names()
    ]
    _check(model, layers, keep, in_stacks)
    refuse_unreachable(model, recipe)
    if recipe.times_state:
        raise UserError(
            f"a rule of recipe {recipe.name!r} changes state from a step on, which `narrowgauge train` does "
            "and convert does not; take the rule's time or its state away"
        )
    recipe = recipe.in_high_precision(keep) if keep else recipe
    if any(matches(name, ROUTER) for name in layers):
        recipe = recipe.with_wide_routers()
    for name in stacks:
        require_plain_state(recipe, name)
    for device in {layer.weight.device for layer in layers.values()}:  # before anything is changed
        verified_backend(recipe, device, backend)
    converted = _replace(model, layers, recipe, backend)
    if "" in converted:
        return converted[""]
    block_of, blocks = block_numbers(model)
    first = len(set(converted.values()))
    for name, stack in stacks.items():
        stack.use(recipe, name, block_of(name), blocks, first, backend)
        first += len(list(stack.layer_names()))
        put(model, name, stack)
    replace_places(model, recipe, block_of, blocks)
    refuse_wrapping(model)
    warn_of_unreached(model)
    return model


def _replace(
    model: torch.nn.Module, layers: Mapping[str, torch.nn.Module], recipe: Recipe, backend: str
) -> dict[str, Linear]:
    """Put each layer under its recipe, in place; the layers by name, with the model itself as ""."""
    block_of, blocks = block_numbers(model)
    names: dict[torch.nn.Module, list[str]] = {}
    for name, layer in layers.items():
        names.setdefault(layer, []).append(name)
    converted: dict[torch.nn.Module, Linear] = {}
    shared = _shared_parameters(model)
    for name, layer in layers.items():
        if layer not in converted:
            named_blocks = [(n, block_of(n)) for n in names[layer]]
            layer_recipe = recipe.for_layer(named_blocks, blocks)
            if layer.weight in shared:
                layer_recipe = layer_recipe.with_places(WIDE_WEIGHT)
            is_transposed = _is_transposed(layer)
            converted[layer] = Linear(layer, layer_recipe, len(converted), is_transposed, recipe, backend)
            converted[layer].train(layer.training)
        if name:
            put(model, name, converted[layer])
    return {name: converted[layer] for name, layer in layers.items()}


def _check(
    model: torch.nn.Module, layers: dict[str, torch.nn.Module], keep: Sequence[str], in_stacks: Sequence[str]
) -> None:
    """Refuse what `convert` cannot do, before anything is changed."""
    if not layers:
        raise UserError(
            f"no torch.nn.Linear in {type(model).__name__}: a recipe has nothing to act on; "
            "convert the module that holds the linear layers"
        )
    example = next(reversed(layers))
    for pattern in keep:
        if not any(matches(name, pattern) for name in (*layers, *in_stacks)):
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
        if isinstance(layer, torch.nn.Linear) and not isinstance(layer, Linear):
            require_plain(name, layer)


def _shared_parameters(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Parameters that several modules hold, such as a head tied to an embedding: they stay fp32."""
    named = (m.named_parameters(recurse=False, remove_duplicate=False) for m in model.modules())
    owners = Counter(p for parameters in named for _, p in parameters)
    return {p for p, count in owners.items() if count > 1}


def set_step(
    model: torch.nn.Module,
    seed: int,
    step: int,
    first_sample: int,
    steps: int | None = None,
    decay: int | None = None,
) -> None:
    """Set the position of training in every converted module and dropout; called before each forward pass.

    Random bits become those of (seed, step, tensor, element), delayed scales are renewed when a step begins,
    and rules that waited for the step hold.

    Args:
        model: A model that `convert` has changed.
        seed: The seed of the run.
        step: The optimizer step, from 1.
        first_sample: The index in the step's global batch of the first sequence of this forward pass.
        steps: The steps of the full run, for rules that hold after a share of it.
        decay: The first step whose learning rate is below the peak, for rules that hold from then on.

    Raises:
        UserError: The recipe has such a rule, and its argument is None.
    """
    layers = [module for module in model.modules() if isinstance(module, Stepped)]
    for layer in layers:
        if decay is None and any(rule.follows_schedule for rule in layer.recipe.rules):
            raise UserError(
                f"a rule of recipe {layer.recipe.name!r} waits for the decay of the learning rate, and its "
                "first step is not known; give set_step the argument `decay`"
            )
        if steps is None and any(rule.needs_length for rule in layer.recipe.rules):
            raise UserError(
                f"a rule of recipe {layer.recipe.name!r} holds from a share of the steps on, and their "
                "number is not known; give set_step the argument `steps`"
            )
    end_steps(h for layer in layers if layer.step != step for h in layer.histories.values())
    for layer in layers:
        layer.set_position(seed, step, first_sample, steps, decay, is_ended=True)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.set_position(seed, step, first_sample, next(model.parameters()).device)


def step(model: torch.nn.Module) -> None:
    """Say that an optimizer step was taken: the next forward pass that records gradients begins another one.

    A loop that calls neither this nor `set_step` is served, too: layers hear of every step of a
    `torch.optim.Optimizer`. This says it where no such optimizer moves the weights, or where another model's
    does between two micro-batches. From the first call on only these calls count.

    Args:
        model: A model that `convert` has changed.
    """
    for module in model.modules():
        if isinstance(module, Stepped):
            module.step_taken()


def discard_step(model: torch.nn.Module) -> None:
    """Undo what a computed step changed in the state of recipes, if the optimizer does not take the step.

    Histories of delayed scales forget what they saw since `set_step` began the step, and pre-scaling factors
    go back. Weights and masters have not moved yet, because only the optimizer moves them.
    """
    for module in model.modules():
        if isinstance(module, Linear):
            module.discard_step()


def recipe_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state of recipes that moves the trajectory, as `{"LAYER.PLACE.NAME": tensor}`.

    It holds histories of operands (delayed scales, kept channels), scales of weights, masters and factors of
    pre-scaling. The tensors are the model's own: copy into them to restore. A plain state dict does not hold
    them.
    """
    owners: list[tuple[str, History | ParamState]] = []
    prescales: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, History):
            owners.append((name, module))
        elif isinstance(module, Linear):
            if module.state_at_rest is not None:
                owners.append((name, module.state_at_rest))
            if module.reduce_prescale is not None:
                prescales |= {f"{name}.reduce.{k}": t for k, t in module.reduce_prescale.tensors.items()}
    return prescales | {f"{name}.{key}": t for name, owner in owners for key, t in owner.tensors().items()}


def _is_conv1d(module: torch.nn.Module) -> bool:
    """Whether this is Hugging Face's linear layer with a (K, N) weight (transformers is never imported)."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def _is_transposed(layer: torch.nn.Module) -> bool:
    return layer.spec.transposed if isinstance(layer, Linear) else _is_conv1d(layer)


def _is_linear(module: torch.nn.Module) -> bool:
    # The last is for MultiheadAttention, which reads the weight of its output layer and never calls it.
    is_other = isinstance(module, NonDynamicallyQuantizableLinear | ExpertLinear)
    return _is_conv1d(module) or (isinstance(module, torch.nn.Linear) and not is_other)


def block_numbers(model: torch.nn.Module) -> tuple[Callable[[str], int | None], int]:
    """Blocks as rules count them: the block of a name, and their number.

    They are the modules of the longest ModuleList, or ModuleDict whose keys are numbers (torchtitan).
    """
    lists = {n: m for n, m in model.named_modules() if _is_list(m)}
    if not lists:
        return lambda name: None, 0
    name, blocks = max(lists.items(), key=lambda item: len(item[1]))
    return partial(_block_of, prefix=f"{name}." if name else ""), len(blocks)


def _is_list(module: torch.nn.Module) -> TypeGuard[torch.nn.ModuleList | torch.nn.ModuleDict]:
    is_numbered = isinstance(module, torch.nn.ModuleDict) and all(key.isdecimal() for key in module)
    return is_numbered or isinstance(module, torch.nn.ModuleList)


def _block_of(name: str, prefix: str) -> int | None:
    """The number of the block that holds a layer."""
    if not name.startswith(prefix):
        return None
    number = name.removeprefix(prefix).partition(".")[0]
    return int(number) if number.isdecimal() else None
