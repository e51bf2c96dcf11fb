"""Saves and restores the state of an optimizer bit for bit.

A saved state is checked against the optimizer before anything is copied. That of `torch.optim.AdamW` is taken
as well: its moments are rounded once to the recipe's casts.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from narrowgauge.optim.carried_state import PREFIX, CarriedState, require_same_tensors
from narrowgauge.optim.groups import require_served
from narrowgauge.optim.sharded_state import as_saved
from narrowgauge.quantization import QuantizedState, local_tensor
from narrowgauge.recipes import Recipe
from narrowgauge.system.errors import UserError

TORCHS = {"m": "exp_avg", "v": "exp_avg_sq"}  # its moments in the state of torch's AdamW
OPTIONS = ("lr", "betas", "eps", "weight_decay", "initial_lr")  # that both have


class SavedOptimizer(torch.optim.Optimizer):
    """The part of an optimizer with moments in casts that saves and restores its state."""

    recipe: Recipe  # the recipe with the casts of the moments
    seed: int  # the seed of stochastic rounding
    # a model whose recipe's state it carries, also where it updates none of the layers' weights
    model: torch.nn.Module | None = None

    def tensors(self, names: Mapping[torch.Tensor, str]) -> dict[str, torch.Tensor]:
        """The state as `{"NAME.m.values": tensor, ...}`, without copies; `names` names the parameters."""
        return {f"{names[p]}.{key}": t for p in self.parameters() for key, t in self._tensors_of(p).items()}

    def restore(self, names: Mapping[torch.Tensor, str], saved: Mapping[str, torch.Tensor]) -> None:
        """Copy saved state back, bit for bit.

        Args:
            names: The name of each parameter, as for `tensors`.
            saved: The tensors of `tensors`, saved by an optimizer of the same model under the same recipe.
        """
        current = self.tensors(names)
        require_same_tensors(current, saved)
        for key, tensor in saved.items():
            current[key].copy_(tensor)

    def state_dict(self) -> dict[str, Any]:
        """`own_state_dict`, with what the recipe keeps for the model (`carried_state.py`).

        Under FSDP2, every process calls it, and gets its part (`sharded_state.py`).
        """
        saved = self.own_state_dict()
        for p, (key, state) in zip(self.parameters(), saved["state"].items(), strict=True):
            saved["state"][key] = {name: as_saved(t, p) for name, t in state.items()}
        saved["state"][0] |= CarriedState(self.parameters(), self.model).saved()
        return saved

    def own_state_dict(self) -> dict[str, Any]:
        """The state by position of the parameter, and the groups; only tensors and numbers."""
        positions = {p: i for i, p in enumerate(self.parameters())}
        groups = [{**g, "params": [positions[p] for p in g["params"]]} for g in self.param_groups]
        return {"state": {i: self._tensors_of(p) for p, i in positions.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a `state_dict` back without changing dtypes, as torch's method would.

        Load the model's first.

        Raises:
            UserError: It is the state of another model, recipe, algorithm, division into groups, or of other
                weights than the model has; nothing was changed.
        """
        require_same_groups(self.param_groups, state_dict["param_groups"])
        groups = state_dict["param_groups"]
        saved = [state_dict["state"].get(key, {}) for group in groups for key in group["params"]]  # or names
        states = {
            p: {name: torch.as_tensor(t, device=getattr(t, "device", "cpu")) for name, t in of.items()}
            for p, of in zip(self.parameters(), saved, strict=True)
        }
        if any("exp_avg" in state for state in states.values()) or not any(states.values()):
            require_torchs_adamw(self.param_groups, groups)
            states = {p: _from_torch(state, self.moments(p)) for p, state in states.items()}
            groups = [{key: group[key] for key in OPTIONS if key in group} for group in groups]
        own: dict[str, torch.Tensor] = {}
        carried: dict[str, torch.Tensor] = {}
        for i, state in enumerate(states.values()):
            for key, t in state.items():
                is_recipes = key.startswith(PREFIX)
                (carried if is_recipes else own)[key if is_recipes else f"{i}.{key}"] = local_tensor(t)
        of_recipe = CarriedState(self.parameters(), self.model)
        parts = of_recipe.local_parts(carried) if carried else {}
        self.restore({p: str(i) for i, p in enumerate(states)}, own)
        if parts:
            of_recipe.load(parts)
        for group, options in zip(self.param_groups, deepcopy(groups), strict=True):
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


def _from_torch(
    state: Mapping[str, torch.Tensor], moments: Mapping[str, QuantizedState]
) -> dict[str, torch.Tensor]:
    """A parameter's tensors, from those of torch's AdamW; zeros before its first step."""
    ours = {"step": state.get("step", torch.zeros((), device="cpu")).float()}
    for place, kept in moments.items():
        rounded = kept.like(kept.cast)
        if (name := TORCHS.get(place, "")) in state:
            x = local_tensor(state[name])
            require_same_tensors({name: torch.empty(kept.shape, dtype=x.dtype, device="meta")}, {name: x})
            rounded.write(x.to(kept.device).float())
        ours |= {f"{place}.{key}": t for key, t in rounded.tensors.items()}
    return ours


def require_torchs_adamw(current: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Require that AdamW updates all groups, and that torch's optimizer updated them by the same formula."""
    for group, options in zip(current, saved, strict=True):
        require_served(options, ())
        is_adam = options.get("decoupled_weight_decay") is False and options["weight_decay"]
        if is_adam or group["algorithm"] != "adamw":
            raise UserError(
                f"the state of {'torch.optim.Adam with weight decay' if is_adam else 'AdamW'} is not one of "
                f"{group['algorithm']}: load it into the same optimizer, or begin with new moments"
            )


def require_same_groups(current: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Require the same division of parameters into groups."""
    sizes, saved_sizes = ([len(group["params"]) for group in groups] for groups in (current, saved))
    if saved_sizes != sizes:
        raise UserError(
            f"the saved optimizer has {len(saved)} groups of {saved_sizes} parameters, and this one has "
            f"{len(current)} of {sizes}: make the optimizer with the groups that were saved"
        )
