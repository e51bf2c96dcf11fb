"""The state of a custom training loop, saved and loaded bit for bit.

A module's plain `state_dict` holds every weight as float32 values, which any program can read. Resuming
exactly needs more: the codes and masters of low-precision weights, the histories of delayed scales, the
factors of pre-scaling, and the step, which determines random bits.
"""

from collections.abc import Mapping
from typing import Any

import torch

from narrowgauge.nn.step_state import recipe_tensors, require_same_tensors, stepped_modules
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.quantization import state_of, stored_tensor
from narrowgauge.system.errors import UserError, checked, require


def state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Everything needed to resume exactly. Call it between two steps, after `zero_grad`.

    Args:
        model: A model that `convert` has changed.
        optimizer: Its optimizer; `narrowgauge.AdamW` and `Muon` keep their state exactly.

    Returns:
        Tensors, not copied, and plain numbers; `torch.load(..., weights_only=True)` reads them.
    """
    state = recipe_state(model) | {"model": model.state_dict()}
    if isinstance(optimizer, Optimizer):  # the recipe's state is in `recipe_state`
        state["optimizer"] = optimizer.own_state_dict()
    elif optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    return state


@checked
def recipe_state(model: torch.nn.Module) -> dict[str, Any]:
    """What exact resumption needs in addition to the `state_dict` of the model and of the optimizer.

    Args:
        model: A model that `convert` has changed.

    Returns:
        Tensors in three groups: low-precision weights and tensors of `recipe_tensors`, not copied, and
        positions.
    """
    named = model.named_parameters()
    return {
        "stored": {name: stored_tensor(p) for name, p in named if state_of(p).weight is not None},
        "recipe": recipe_tensors(model),
        "position": {name: module.position() for name, module in stepped_modules(model).items()},
    }


@checked
def load_state_dict(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]
) -> None:
    """Load a `state_dict`; training then continues with the same digits as without interruption.

    Args:
        model: A model of the same kind, under the same recipe.
        optimizer: Its optimizer, or None if the state is of a model alone.
        state: The result of `state_dict`.

    Raises:
        UserError: The state is of another model or recipe, or has no optimizer state; nothing was changed.
    """
    _require_same(model, state)
    require("state['model']", state.get("model"), Mapping)
    if optimizer is not None and "optimizer" not in state:
        raise UserError("the state has no optimizer state; pass None as the optimizer, or save with it")
    model.load_state_dict(state["model"])
    load_recipe_state(model, state)
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])


def load_recipe_state(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load a `recipe_state`, after the model's `load_state_dict`.

    Args:
        model: A model of the same kind, under the same recipe.
        state: The result of `recipe_state`, or of `state_dict`.
    """
    current = _require_same(model, state)
    with torch.no_grad():
        for kind in ("stored", "recipe"):
            for name, tensor in current[kind].items():
                tensor.copy_(state[kind][name])
    for name, module in stepped_modules(model).items():
        module.restore_position(state["position"][name])


def _require_same(model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The model's `recipe_state`, after checking that another one has the same names, shapes and dtypes."""
    current = recipe_state(model)
    for kind, tensors in current.items():
        require(f"state[{kind!r}]", saved := state.get(kind, {}), Mapping)
        require_same_tensors(tensors, saved)
    return current
