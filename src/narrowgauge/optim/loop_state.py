"""The state of a training loop of one's own, saved and loaded bit for bit.

A module's plain `state_dict` holds every weight as float32 numbers, for use anywhere. A trajectory needs
more: the codes and masters of narrow weights, the histories of delayed scales, the factors of pre-scaling,
and the step from which random bits follow.
"""

from collections.abc import Mapping
from typing import Any

import torch

from narrowgauge.errors import UserError
from narrowgauge.nn import recipe_tensors
from narrowgauge.nn.step_state import Stepped
from narrowgauge.quantization import state_of, stored_tensor


def state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """All that moves the trajectory, to be taken between two steps, when gradients have been dropped.

    Args:
        model: A model that `convert` has changed.
        optimizer: Its optimizer; `narrowgauge.AdamW` and `Muon` keep their state exactly.

    Returns:
        Tensors, not copied, and plain numbers: `torch.load(..., weights_only=True)` reads it.
    """
    state = {"model": model.state_dict(), **recipe_state(model)}
    return state if optimizer is None else state | {"optimizer": optimizer.state_dict()}


def recipe_state(model: torch.nn.Module) -> dict[str, Any]:
    """What a trajectory needs in addition to the model's own `state_dict` and the optimizer's.

    Args:
        model: A model that `convert` has changed.

    Returns:
        Tensors, not copied, and plain numbers, in three groups: numbers of narrow weights, tensors of
        `recipe_tensors`, positions.
    """
    return {
        "stored": _stored_weights(model),
        "recipe": recipe_tensors(model),
        "position": {name: layer.position() for name, layer in _layers(model).items()},
    }


def load_state_dict(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]
) -> None:
    """Go back to a `state_dict`: from there on, the same digits as without the interruption.

    Args:
        model: A model of the same kind, under the same recipe.
        optimizer: Its optimizer, or None if the state is of a model alone.
        state: The result of `state_dict`.

    Raises:
        UserError: The state is of another model or recipe, or has no optimizer's; nothing was changed.
    """
    _require_same(model, state)
    if optimizer is not None and "optimizer" not in state:
        raise UserError("the state is of a model alone; give None as the optimizer, or save with one")
    model.load_state_dict(state["model"])
    load_recipe_state(model, state)
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])


def load_recipe_state(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Go back to a `recipe_state`, after the model's own `load_state_dict`.

    Args:
        model: A model of the same kind, under the same recipe.
        state: The result of `recipe_state`, or of `state_dict`.

    Raises:
        UserError: The state is of another model or recipe; nothing was changed.
    """
    current = _require_same(model, state)
    with torch.no_grad():
        for kind in ("stored", "recipe"):
            for name, tensor in current[kind].items():
                tensor.copy_(state[kind][name])
    for name, layer in _layers(model).items():
        layer.restore_position(state["position"][name])


def _require_same(model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The model's own state, by kind, which has the names of another state."""
    current: dict[str, Mapping[str, Any]] = {
        "stored": _stored_weights(model),
        "recipe": recipe_tensors(model),
        "position": _layers(model),
    }
    for kind, existing in current.items():
        if different := sorted(existing.keys() ^ state.get(kind, {}).keys()):
            raise UserError(
                f"the state is of another model or recipe: {different[0]!r} is in one of the two only; "
                "convert the model under the recipe that it was saved under"
            )
        for name, own in existing.items():
            ours, theirs = (_form(x) for x in (own, state[kind][name]))
            if ours != theirs:
                raise UserError(
                    f"the state is of another model or recipe: {name!r} is {theirs} there, and {ours} here; "
                    "convert the model under the recipe that it was saved under"
                )
    return current


def _form(x: torch.Tensor | Stepped | Mapping[str, Any]) -> str:
    """What two states of one recipe have in common: dtype and shape, or the number of random streams."""
    if isinstance(x, torch.Tensor):
        return f"{x.dtype} {tuple(x.shape)}"
    position = x.position() if isinstance(x, Stepped) else x
    return f"a layer of {len(position['keys'])} random streams"


def _layers(model: torch.nn.Module) -> dict[str, Stepped]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Stepped)}


def _stored_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The codes or values of the weights that are kept in casts."""
    return {n: stored_tensor(p) for n, p in model.named_parameters() if state_of(p).weight is not None}
