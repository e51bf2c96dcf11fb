"""The state of a run, transferred to a model and an optimizer under another recipe.

A rebuilt trainer is what a resume would build. So everything that depends on the recipe (layers, sharding,
gradient hooks, compiled code) is right by construction, on any number of processes. State in equal casts is
copied bit for bit; state whose cast changes is rounded once, from the most precise values available.

A second moment that a cast has rounded to zero stays lost in a wider one: the next updates would still divide
by almost nothing. All that is known is that it was at most half the smallest value under its scale. It gets
that bound, so the update is not larger than it would have been, and v forgets the bound as it forgets
gradients.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass

import torch

from narrowgauge.nn import recipe_tensors
from narrowgauge.optim import Optimizer
from narrowgauge.quantization import QuantizedState, local_tensor, state_of, stored_tensor, write_weight

CPU = torch.device("cpu")


@dataclass(frozen=True)
class HeldParameter:
    """The values of a parameter and its state."""

    stored: torch.Tensor
    at_rest: Mapping[str, QuantizedState]  # "weight" and "master"
    moments: Mapping[str, QuantizedState]
    steps: torch.Tensor

    def wide(self) -> torch.Tensor:
        """The most precise values of the weight, in float32."""
        kept = self.at_rest.get("master") or self.at_rest.get("weight")
        return self.stored.float() if kept is None else kept.read()


@dataclass(frozen=True)
class HeldState:
    """The values of a model and its optimizer between two steps, when there are no gradients.

    They are in the host's memory, so that a GPU never holds them twice.
    """

    parameters: Mapping[str, HeldParameter]
    of_recipe: Mapping[str, torch.Tensor]


@torch.no_grad()
def hold(model: torch.nn.Module, optimizer: Optimizer) -> HeldState:
    """Take the values of a model and its optimizer, which are no longer used."""
    of_recipe = {name: t.to(CPU) for name, t in recipe_tensors(model).items()}
    parameters = {}
    for name, p in model.named_parameters():
        stored, moments = local_tensor(stored_tensor(p)).cpu(), optimizer.moments(p)
        at_rest = {place: s for place, s in state_of(p).by_place().items() if place != "grad"}
        for state in (*at_rest.values(), *moments.values()):
            state.move(CPU)
        parameters[name] = HeldParameter(stored, at_rest, moments, optimizer.state[p]["step"].cpu())
    return HeldState(parameters, of_recipe)


@torch.no_grad()
def put_back(held: HeldState, model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Copy these values to a model and its optimizer under another recipe. Collective."""
    for name, tensor in recipe_tensors(model).items():  # histories and factors of pre-scaling
        if name in held.of_recipe and held.of_recipe[name].shape == tensor.shape:
            tensor.copy_(held.of_recipe[name])
    for name, p in model.named_parameters():
        old = held.parameters[name]
        now = {place: s for place, s in state_of(p).by_place().items() if place != "grad"}
        if {place: s.cast for place, s in now.items()} == {place: s.cast for place, s in old.at_rest.items()}:
            local_tensor(stored_tensor(p)).copy_(old.stored)
            for place, state in now.items():
                _copy(old.at_rest[place], state)
        else:
            write_weight(p, old.wide().to(p.device))
        optimizer.state[p]["step"].copy_(old.steps)
        for place, moment in optimizer.moments(p).items():
            if moment.cast == old.moments[place].cast:
                _copy(old.moments[place], moment)
            else:
                read = bounded if place == "v" else QuantizedState.read
                moment.write(read(old.moments[place]).to(moment.device))


def _copy(old: QuantizedState, new: QuantizedState) -> None:
    for name, tensor in new.tensors.items():
        tensor.copy_(old.tensors[name])


def bounded(v: QuantizedState) -> torch.Tensor:
    """The values of a second moment in float32, with the bound in place of each that underflowed.

    Only casts with a scale, and elements of 8 or 16 bits, round second moments to zero.
    """
    x, cast = v.read(), v.cast
    if not cast.is_scaled or cast.codebook or cast.element.bits < 8:
        return x
    smallest = copy(v)  # the smallest value under each scale, in place of every element
    smallest.prefetched = None
    if "codes" in v.tensors:
        smallest.tensors = {**v.tensors, "codes": torch.ones_like(v.tensors["codes"])}
    else:
        subnormal = torch.full_like(v.tensors["values"], cast.element.smallest_subnormal)
        smallest.tensors = {**v.tensors, "values": subnormal}
    return torch.where(x == 0, smallest.read() / 2, x)
