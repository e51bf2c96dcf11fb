"""Saves and restores the state of an optimizer bit for bit.

A saved state is checked against the optimizer before anything is copied.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from narrowgauge.errors import UserError
from narrowgauge.optim.carried_state import (
    PREFIX,
    carried_tensors,
    layers_of,
    load_carried,
    local_parts,
)
from narrowgauge.optim.sharded_state import as_saved
from narrowgauge.quantization import QuantizedState, local_tensor
from narrowgauge.recipes import Recipe

MASTER = ".master.values"  # suffix of the name of a 16-bit parameter's master (`half_precision.py`)


class SavedOptimizer(torch.optim.Optimizer):
    """The part of an optimizer with moments in casts that saves and restores its state.

    Attributes:
        recipe: The recipe with the casts of the moments.
        seed: The seed of stochastic rounding.
    """

    recipe: Recipe
    seed: int

    def tensors(self, names: Mapping[torch.Tensor, str]) -> dict[str, torch.Tensor]:
        """The state as `{"NAME.m.values": tensor, ...}`, without copies; `names` names the parameters."""
        return {f"{names[p]}.{key}": t for p in self.parameters() for key, t in self._tensors_of(p).items()}

    def restore(self, names: Mapping[torch.Tensor, str], saved: Mapping[str, torch.Tensor]) -> None:
        """Copy saved state back, bit for bit.

        Args:
            names: The name of each parameter, as for `tensors`.
            saved: The tensors of `tensors`, saved by an optimizer of the same model under the same recipe.

        Raises:
            UserError: It is the state of another model or of another recipe; the first difference is named.
        """
        current = self.tensors(names)
        absent = {k for k in current.keys() - saved.keys() if k.endswith(MASTER)}  # from an older release
        require_same_tensors({k: t for k, t in current.items() if k not in absent}, saved)
        for key in absent:
            current[key].zero_()  # it restarts from the parameter
        for key, tensor in saved.items():
            current[key].copy_(tensor)

    def state_dict(self) -> dict[str, Any]:
        """`own_state_dict`, with what the recipe keeps for each parameter (`carried_state.py`).

        Under FSDP2, every process calls it, and gets its part (`sharded_state.py`).
        """
        saved = self.own_state_dict()
        layers = layers_of(self.parameters())
        for p, (key, state) in zip(self.parameters(), saved["state"].items(), strict=True):
            own = {name: as_saved(t, p) for name, t in state.items()}
            saved["state"][key] = own | carried_tensors(p, layers)
        return saved

    def own_state_dict(self) -> dict[str, Any]:
        """The state by position of the parameter, and the groups; only tensors and numbers."""
        positions = {p: i for i, p in enumerate(self.parameters())}
        state = {i: self._tensors_of(p) for p, i in positions.items()}
        groups = [{**g, "params": [positions[p] for p in g["params"]]} for g in self.param_groups]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a `state_dict` back without changing dtypes, as torch's method would.

        Load the model's first. A state of an older release carries nothing of the recipe's.

        Raises:
            UserError: It is the state of another model, recipe, division into groups, or of other weights
                than the model has; nothing was changed.
        """
        require_same_groups(self.param_groups, state_dict["param_groups"])
        groups = state_dict["param_groups"]
        # torch's functions for checkpoints name parameters; an older state numbers them, and has no list.
        keys = [key for group in groups for key in group.get("params", ())] or range(len(self.parameters()))
        states = {p: state_dict["state"].get(key, {}) for p, key in zip(self.parameters(), keys, strict=True)}
        own: dict[torch.Tensor, dict[str, torch.Tensor]] = {p: {} for p in states}
        carried: dict[torch.Tensor, dict[str, torch.Tensor]] = {p: {} for p in states}
        for p, state in states.items():
            for key, t in state.items():
                (carried if key.startswith(PREFIX) else own)[p][key] = local_tensor(t)
        layers, names = layers_of(states), {p: str(i) for i, p in enumerate(states)}
        is_carried = any(carried.values())
        if is_carried:
            carried = {p: local_parts(p, layers, state) for p, state in carried.items()}
        self.restore(names, {f"{names[p]}.{key}": t for p, state in own.items() for key, t in state.items()})
        for p in states if is_carried else ():
            load_carried(p, layers, carried[p])
        for group, options in zip(self.param_groups, deepcopy(state_dict["param_groups"]), strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickling and copying: that of torch's optimizers, the recipe and the seed."""
        return super().__getstate__() | {"recipe": self.recipe, "seed": self.seed}

    def parameters(self) -> list[torch.Tensor]:
        """All parameters, in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def moments(self, p: torch.Tensor) -> dict[str, QuantizedState]:
        """A parameter's moments, by place ("m", "v")."""
        return {place: s for place, s in self.state[p].items() if isinstance(s, QuantizedState)}

    def _tensors_of(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        for m in self.moments(p).values():
            m.wait()
        moments = {f"{place}.{k}": t for place, m in self.moments(p).items() for k, t in m.tensors.items()}
        return {"step": self.state[p]["step"]} | moments


def require_same_tensors(current: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Require the same names, shapes and dtypes.

    Raises:
        UserError: It is the state of another model or of another recipe; the first difference is named.
    """
    if unknown := sorted(saved.keys() - current.keys()) or sorted(current.keys() - saved.keys()):
        owner = "the checkpoint" if unknown[0] in saved else "this optimizer"
        raise UserError(
            f"the checkpoint is of another optimizer: only {owner} has {unknown[0]!r}; use the run's "
            "configuration, or `narrowgauge convert` to continue under another recipe"
        )
    for key, tensor in saved.items():
        if tensor.dtype != current[key].dtype or tensor.shape != current[key].shape:
            saved_as, kept_as = (f"{t.dtype} {tuple(t.shape)}" for t in (tensor, current[key]))
            raise UserError(
                f"the checkpoint's optimizer state {key!r} is {saved_as}, but this recipe stores it as "
                f"{kept_as}; use the run's recipe, or `narrowgauge convert` to continue under another"
            )


def require_same_groups(current: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Require the same division of parameters into groups.

    Raises:
        UserError: The number of groups, or of parameters in a group, differs.
    """
    sizes = [len(group["params"]) for group in current]
    # An older state does not record the sizes of its groups.
    saved_sizes = [len(g["params"]) if "params" in g else n for g, n in zip(saved, sizes, strict=False)]
    if len(saved) != len(current) or saved_sizes != sizes:
        raise UserError(
            f"the saved optimizer has {len(saved)} groups of {saved_sizes} parameters, and this one has "
            f"{len(current)} of {sizes}: make the optimizer with the groups that were saved"
        )
