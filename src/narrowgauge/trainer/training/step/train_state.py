"""The state of a run: saved to a checkpoint and restored bit for bit, or transferred to another recipe.

The trajectory is a function of the configuration and of: the weights, the optimizer's moments and step
counts, the number of steps done, and the guard's state. Token order and random bits are pure functions of
seed and step (and of how much data the guard has skipped), so there is no generator, cursor or loader state
to save.

A checkpoint of several processes holds slices of global tensors. A parameter's `TensorShard` describes its
local rows and columns. The tensors of its state are divided in the same way: packed bytes, scales of blocks
and scalars belong to the process of their elements.

Where a rule changes the format of state, a trainer is rebuilt as a resume would build it, and the state is
transferred (`hold`, `put_back`). So everything that depends on the recipe (layers, sharding, gradient hooks,
compiled code) is right by construction, on any number of processes. State in equal casts is copied bit for
bit; state whose cast changes is rounded once, from the most precise values available.

A second moment that a cast has rounded to zero stays lost in a wider one: the next updates would still divide
by almost nothing. All that is known is that it was at most half the smallest value under its scale. It gets
that bound, so the update is not larger than it would have been, and v forgets the bound as it forgets
gradients.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from narrowgauge.guard import Guard
from narrowgauge.nn import recipe_tensors
from narrowgauge.optim import Optimizer
from narrowgauge.quantization import (
    QuantizedState,
    ShardAxis,
    TensorShard,
    full_axis,
    local_tensor,
    shard_of,
    state_of,
    stored_tensor,
    write_weight,
)
from narrowgauge.recipes import Recipe
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import (
    JSON,
    LocalTensor,
    LocalTensors,
    SavePlan,
    plan_save,
    restore_distributed,
)
from narrowgauge.trainer.distributed import Engine
from narrowgauge.trainer.models import Transformer
from narrowgauge.trainer.training.config.config import Config
from narrowgauge.trainer.training.step.build_model import go_to
from narrowgauge.trainer.training.step.step_faults import fingerprint, require_same_replicas

_CPU = torch.device("cpu")


@dataclass
class TrainState:
    """Everything that changes from step to step; with several processes, the local shard of it."""

    config: Config
    device: torch.device
    model: Transformer
    optimizer: Optimizer
    engine: Engine
    guard: Guard
    step: int = 0  # the number of steps done
    scaler: torch.amp.GradScaler | None = None  # the loss scaling, if gradients pass through fp16

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter."""
        return {p: name for name, p in self.model.named_parameters()}

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run, without the guard's raises."""
        return self.config.spec.recipe

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of a checkpoint by group and name, as this process holds them (not copied)."""
        groups = {
            "model": {n: stored_tensor(p) for n, p in self.model.named_parameters(remove_duplicate=False)},
            "optimizer": self.optimizer.tensors(self.names),
        }
        of_recipe = recipe_tensors(self.model)
        return groups | ({"recipe": of_recipe} if of_recipe else {})

    def local_tensors(self) -> LocalTensors:
        """The same tensors, each as local slices of the global tensor."""
        return local_tensors_of(self.tensors(), dict(self.model.named_parameters(remove_duplicate=False)))

    def state(self) -> dict[str, JSON]:
        """The rest of a checkpoint, which is the same on every process."""
        state: dict[str, JSON] = {"guard": self.guard.state()}
        return state | ({"loss_scaling": self.scaler.state_dict()} if self.scaler else {})

    def check_replicas(self) -> None:
        """Compare the tensors that several processes hold, bit for bit.

        Raises:
            Corrupted: two copies differ.
        """
        if self.engine.mesh.is_single:
            return
        local = {  # slices with equal names are equal slices of the same tensor
            group: {f"{name} from {s.offset}": s.tensor for name, slices in named.items() for s in slices}
            for group, named in self.local_tensors().items()
        }
        require_same_replicas(self.engine.gather(fingerprint(local)), self.step)

    def plan_save(self, checkpoints: Path, run_id: str, group: dist.ProcessGroup | None = None) -> SavePlan:
        """Plan a checkpoint of the state after `step` steps; all processes of `group` together."""
        tensors, state, keep = self.local_tensors(), self.state(), self.config.checkpoint.keep
        return plan_save(checkpoints, self.step, tensors, state, keep, run_id, group)

    def fill(self, path: Path, group: dist.ProcessGroup | None) -> None:
        """Fill the state from a checkpoint made under the recipe of the model."""
        with torch.no_grad():
            checkpoint = restore_distributed(path, self.local_tensors(), group)
        self.engine.after_update()
        go_to(self.model, self.config, checkpoint.step, 0)
        self.step = checkpoint.step
        taken = self.step * self.config.spec.batch_size
        self.guard = Guard.from_state(self.config.guard.rules(), checkpoint.state, taken)
        if self.scaler:
            if "loss_scaling" not in checkpoint.state:
                raise UserError(
                    f"the checkpoint of step {self.step} is of another recipe: it has no loss scale, which "
                    "this one keeps; use its own, or `train --branch` to continue under another"
                )
            self.scaler.load_state_dict(checkpoint.state["loss_scaling"])


def local_tensors_of(
    groups: Mapping[str, Mapping[str, torch.Tensor]], parameters: Mapping[str, torch.Tensor]
) -> LocalTensors:
    """The slices of tensors by group and name; a name begins with the name of the tensor's parameter."""
    return {
        group: {name: list(_slices(local_tensor(t), _shard(name, parameters))) for name, t in named.items()}
        for group, named in groups.items()
    }


def _shard(name: str, parameters: Mapping[str, torch.Tensor]) -> TensorShard | None:
    """The shard of `a.b.weight` for `a.b.weight`, `a.b.weight.m.codes` and `a.b.master.codes`."""
    words = name.split(".")
    for end in range(len(words), 0, -1):
        if (parameter := parameters.get(".".join(words[:end]))) is not None:
            return shard_of(parameter)
        if words[end:][:1] in (["weight"], ["master"], ["grad"]):
            parameter = parameters.get(".".join([*words[:end], "weight"]))
            return None if parameter is None else shard_of(parameter)
    return None


def _slices(stored: torch.Tensor, shard: TensorShard | None) -> Iterator[LocalTensor]:
    """The slices of a stored tensor whose parameter has this shard; None if it is not sharded."""
    axes = [_stored_axis(axis, n) for axis, n in zip(shard.axes if shard else (), stored.shape, strict=False)]
    axes += [full_axis(n) for n in stored.shape[len(axes) :]]
    shape = tuple(axis.size for axis in axes)
    for segments in product(*(_segments(axis) for axis in axes)):
        index = tuple(slice(begin, begin + n) for begin, _, n in segments)
        yield LocalTensor(stored[index], shape, tuple(start for _, start, _ in segments))


def _segments(axis: ShardAxis) -> Iterator[tuple[int, int, int]]:
    """(start in the local tensor, start in the global tensor, length) of each segment."""
    begin = 0
    for start, length in axis.segments:
        yield begin, start, length
        begin += length


def _stored_axis(axis: ShardAxis, stored: int) -> ShardAxis:
    """An axis in units of the stored tensor: packed bytes, or scales of blocks; the last may be short."""
    if not axis.groups:
        return full_axis(stored)
    least = max(1, -(-axis.length // max(1, stored)))
    units = (n for n in range(least, axis.size + 1) if axis.is_aligned_to(n))
    return axis.in_blocks(next((n for n in units if axis.in_blocks(n).length == stored), least))


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


#: The values of a model's parameters by name, and the tensors of its recipe.
Held = tuple[Mapping[str, HeldParameter], Mapping[str, torch.Tensor]]


@torch.no_grad()
def hold(model: torch.nn.Module, optimizer: Optimizer) -> Held:
    """Take the values from a model and its optimizer, which the caller then drops.

    They are taken between two steps, when no gradient exists, to the host's memory, so that a GPU never holds
    them twice.
    """
    of_recipe = {name: t.to(_CPU) for name, t in recipe_tensors(model).items()}
    parameters = {}
    for name, p in model.named_parameters():
        stored, moments = local_tensor(stored_tensor(p)).cpu(), optimizer.moments(p)
        at_rest = {place: s for place, s in state_of(p).by_place().items() if place != "grad"}
        for state in (*at_rest.values(), *moments.values()):
            state.move(_CPU)
        parameters[name] = HeldParameter(stored, at_rest, moments, optimizer.state[p]["step"].cpu())
    return parameters, of_recipe


@torch.no_grad()
def put_back(held: Held, model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Copy these values to a model and its optimizer under another recipe. Collective."""
    parameters, of_recipe = held
    for name, tensor in recipe_tensors(model).items():  # histories and factors of pre-scaling
        if name in of_recipe and of_recipe[name].shape == tensor.shape:
            tensor.copy_(of_recipe[name])
    for name, p in model.named_parameters():
        old = parameters[name]
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
