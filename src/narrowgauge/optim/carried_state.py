"""What a recipe keeps for a parameter, as the optimizer's state dict carries it.

The model's state dict holds plain float32 weights, which any program reads. Checkpoints of other programs
(accelerate, Lightning, torch's DCP) hold that and the optimizer's state dict by parameter, and nothing else.
So the optimizer's state of a parameter includes what a resume to the same digits needs:

    recipe.stored               the codes of a weight in a cast
    recipe.weight.*, .master.*  its scales, and its master
    recipe.I.PLACE.*            histories of the I-th layer that multiplies with it, such as delayed scales
    recipe.I.position           the step of that layer, and the keys of its random streams
    recipe.shard                which process's shard all this is of (FSDP2)

Codes and master go only into a model that already has the weights they belong to: an optimizer's state dict
never changes what `model.load_state_dict` has loaded by more than the rounding of its format. Weights that
are loaded once more leave them alone (torch's `set_state_dict` loads the model last).
"""

from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from narrowgauge.collectives import all_reduce_max
from narrowgauge.errors import UserError
from narrowgauge.nn.linear import Linear
from narrowgauge.nn.loop_checks import counting_layers
from narrowgauge.quantization import ParamState, local_tensor, state_of, stored_tensor

PREFIX = "recipe."  # of the names in a parameter's state
POSITION, SHARD = "position", f"{PREFIX}shard"

Layers = Mapping[int, list[Linear]]  # by the id of the weight


def layers_of(parameters: Iterable[torch.Tensor]) -> Layers:
    """The converted layers that multiply with each parameter, in their order in the model.

    A second `convert` makes other layers; the first ones may live on, and do not count.
    """
    found: dict[int, dict[int, Linear]] = {id(p): {} for p in parameters}
    for layer in counting_layers():
        if isinstance(layer, Linear):
            weight = dict(layer.named_parameters(recurse=False)).get("weight")
            if id(weight) in found:
                found[id(weight)][layer.index] = layer
    return {key: [layers[i] for i in sorted(layers)] for key, layers in found.items()}


def carried_tensors(p: torch.Tensor, layers: Layers) -> dict[str, torch.Tensor]:
    """The recipe's state of a parameter by name, copied, because loading the model's weights changes it."""
    own = {f"{PREFIX}{i}.{POSITION}": _as_tensor(layer.position()) for i, layer in _stepped(p, layers)}
    if isinstance(p, DTensor):
        own[SHARD] = _shard_number(p)
    return own | {name: t.clone() for name, t in _tensors(p, layers).items()}


def _shard_number(p: DTensor) -> torch.Tensor:
    """int64, the coordinates of this process among those that share a parameter."""
    return torch.tensor(p.device_mesh.get_coordinate(), dtype=torch.int64)


def _tensors(p: torch.Tensor, layers: Layers) -> dict[str, torch.Tensor]:
    """The tensors of the model that hold the recipe's state of a parameter."""
    record = state_of(p)
    tensors = record.tensors()
    if record.weight is not None:
        tensors["stored"] = stored_tensor(p)
    for i, layer in _stepped(p, layers):
        for place, history in layer.histories.items():
            tensors |= {f"{i}.{place}.{name}": t for name, t in history.tensors().items()}
        if layer.reduce_prescale is not None:
            tensors |= {f"{i}.reduce.{name}": t for name, t in layer.reduce_prescale.tensors.items()}
    return {PREFIX + name: t for name, t in tensors.items()}


def _stepped(p: torch.Tensor, layers: Layers) -> list[tuple[int, Linear]]:
    """The layers of a parameter whose values depend on the step, with their numbers."""
    return [(i, layer) for i, layer in enumerate(layers[id(p)]) if layer.has_memory]


def _is_others(p: DTensor, number: torch.Tensor) -> bool:
    """Whether a saved state is not of its shard on any process; all of them have to stop."""
    mesh, is_own = p.device_mesh, torch.equal(number.cpu(), _shard_number(p))
    flag = torch.tensor(float(not is_own), device=local_tensor(p).device)
    return bool(all_reduce_max(flag, [mesh.get_group(i) for i in range(mesh.ndim)]))


def require_loadable(p: torch.Tensor, layers: Layers, saved: Mapping[str, torch.Tensor]) -> None:
    """Require that a parameter takes a saved state of its recipe.

    Raises:
        UserError: It is of another recipe, of another process's shard, or of other weights than the
            parameter has.
    """
    if isinstance(p, DTensor) and SHARD in saved and _is_others(p, saved[SHARD]):
        raise UserError(
            "the optimizer's state is that of another process's shard: torch.distributed.checkpoint keeps "
            "one process's for all; let each process save its own narrowgauge.state_dict(model, optimizer)"
        )
    current = carried_tensors(p, layers)
    ours, theirs = ({(k, t.dtype, t.shape) for k, t in state.items()} for state in (current, saved))
    if different := ours ^ theirs:
        name = min(name for name, *_ in different)
        raise UserError(
            f"the optimizer's state is of a model under another recipe: {name!r} differs; convert the model "
            "with the recipe that it was saved under"
        )
    record = state_of(p)
    if record.weight is not None and not _is_of(record, saved):
        raise UserError(
            "the optimizer's state carries masters and codes of other weights than the model has: load the "
            "model's state dict first, and then the optimizer's"
        )


def load_carried(p: torch.Tensor, layers: Layers, saved: Mapping[str, torch.Tensor]) -> None:
    """Copy the recipe's state of a parameter back, bit for bit."""
    for name, tensor in _tensors(p, layers).items():
        tensor.copy_(saved[name])
    for i, layer in _stepped(p, layers):
        layer.restore_position(_as_position(saved[f"{PREFIX}{i}.{POSITION}"]))


def _is_of(record: ParamState, saved: Mapping[str, torch.Tensor]) -> bool:
    """Whether a weight has the saved numbers, or what rounding them once more makes of these."""
    weight = record.require_weight()
    first, *others = weight.tensors
    names = {first: "stored"} | {name: f"weight.{name}" for name in others}

    def like(t: torch.Tensor, name: str) -> torch.Tensor:
        return saved[PREFIX + names[name]].view(t.dtype).to(t.device)

    scratch = copy(weight)
    scratch.gauge, scratch.prefetched = None, None
    scratch.tensors = {name: like(t, name).clone() for name, t in weight.tensors.items()}
    values, now = scratch.read().clone(), weight.read()
    scratch.write(values)  # on every process, as the processes with its shards compute its scale together
    return any(torch.allclose(x, now, rtol=0, atol=0, equal_nan=True) for x in (values, scratch.read()))


def _as_tensor(position: Mapping[str, Any]) -> torch.Tensor:
    """A layer's `position` as int64 [6 + 2 streams]; -1 stands for None."""
    numbers = [position["step"], *position["length"]]
    flags = [position["is_set"], position["hears_optimizer"], position["is_told"]]
    keys = [word for key in position["keys"] for word in key]
    return torch.tensor([*(-1 if n is None else n for n in numbers), *map(int, flags), *keys])


def _as_position(tensor: torch.Tensor) -> dict[str, Any]:
    step, *rest = tensor.tolist()
    numbers, flags, words = [step, *rest[:2]], rest[2:5], rest[5:]
    at, steps, decay = (None if n == -1 else n for n in numbers)
    keys = [words[i : i + 2] for i in range(0, len(words), 2)]
    told = dict(zip(("is_set", "hears_optimizer", "is_told"), map(bool, flags), strict=True))
    return {"step": at, "length": [steps, decay], "keys": keys, **told}
