"""What a recipe keeps for a model, as the optimizer's state dict carries it.

The model's state dict holds plain float32 weights, which any program reads. Checkpoints of other programs
(accelerate, Lightning, torch's DCP) hold that and the optimizer's state dict by parameter, and nothing else.
So the optimizer's state of its first parameter includes what a resume to the same digits needs, of all
modules that were converted together with the layers that multiply with its parameters:

    recipe.I.NAME.stored               the codes of a weight in a cast
    recipe.I.NAME.weight.*, .master.*  its scales, and its master
    recipe.I.NAME.PLACE.*              histories of earlier steps, such as delayed scales
    recipe.I.NAME.reduce.*             the pre-scaling factor of its gradient
    recipe.I.NAME.position             the step, and the keys of the random streams

NAME is the module's in the model, and I the number of the conversion. After PLACE and later words the names
are those of `recipe_tensors`.

Codes and master go only into a model that already has the weights they belong to: an optimizer's state dict
never changes what `model.load_state_dict` has loaded by more than the rounding of its format. Weights that
are loaded once more leave them alone (torch's `set_state_dict` loads the model last).

`torch.distributed.checkpoint` takes plain tensors for copies of one another and keeps one process's; DTensors
it divides again among the processes that load them. So the state dict of an optimizer holds, of a parameter
that FSDP2 has sharded:

    elements, scales of rows        DTensors, sharded as the parameter is
    scales of tensors, positions    plain tensors, the same in all processes
    histories                       DTensors with a row for each process, as each sees other samples
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Shard

from narrowgauge.nn.linear import Linear
from narrowgauge.nn.step_state import Stepped, living_modules, require_same_tensors
from narrowgauge.optim.groups import require_served
from narrowgauge.quantization import ParamState, QuantizedState, state_of, stored_tensor
from narrowgauge.system.errors import UserError
from narrowgauge.system.torch_compat import local_tensor

TORCHS = {"m": "exp_avg", "v": "exp_avg_sq"}  # its moments in the state of torch's AdamW
TORCHS_OPTIONS = ("lr", "betas", "eps", "weight_decay", "initial_lr")  # that both have
PREFIX = "recipe."  # of the names in the first parameter's state


def _weight_of(module: Stepped) -> torch.Tensor | None:
    """The parameter that a layer multiplies with; None if it is computed, or a slice of another."""
    return dict(module.named_parameters(recurse=False)).get("weight") if isinstance(module, Linear) else None


class CarriedState:
    """The state of a recipe in the model of an optimizer.

    Attributes:
        tensors: The model's tensors by name, each with its form in a state dict: a function of a copy.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], model: torch.nn.Module | None = None) -> None:
        """Find the modules that were converted together with an optimizer's layers.

        A second `convert` makes other layers; the first ones may live on, and do not count.

        Args:
            parameters: The optimizer's.
            model: A model all of whose layers count, also those without a weight among the parameters.
        """
        own, inside = {id(p) for p in parameters}, set() if model is None else set(model.modules())
        layers = (x for x in living_modules() if x in inside or id(_weight_of(x)) in own)
        conversions = dict.fromkeys(layer.conversion for layer in layers)
        self.modules: dict[str, Stepped] = {
            f"{PREFIX}{i}.{name}.": module
            for i, conversion in enumerate(conversions)
            for name, module in conversion.modules.items()
        }
        self.weights = {name: w for name, m in self.modules.items() if (w := _weight_of(m)) is not None}
        self.positions = {f"{name}position": m for name, m in self.modules.items() if m.follows_step}
        self.tensors: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {
            name: (module.position(), torch.Tensor.detach) for name, module in self.positions.items()
        }
        for name, module in self.modules.items():
            of = self.weights.get(name, parameters[0])  # they are sharded as this is
            row, part = partial(as_row, p=of), partial(as_saved, p=of)
            self.tensors |= {name + key: (t, row) for key, t in module.history_tensors().items()}
            self.tensors |= {name + key: (t, part) for key, t in module.weight_tensors().items()}
            if name in self.weights and state_of(of).weight is not None:
                self.tensors[f"{name}stored"] = stored_tensor(of), part

    def saved(self) -> dict[str, torch.Tensor]:
        """The state by name, copied, because loading the model's weights changes it."""
        return {name: saved(t.clone()) for name, (t, saved) in self.tensors.items()}

    def local_parts(self, saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What this process keeps of a saved state."""
        kept = {name: t for name, (t, _) in self.tensors.items()}
        parts = {name: as_kept(t, kept[name]) if name in kept else t for name, t in saved.items()}
        require_same_tensors(kept, parts)
        for name, record in ((name, state_of(weight)) for name, weight in self.weights.items()):
            if record.weight is not None and not _is_of(record, name, parts):
                raise UserError(
                    "the optimizer's state carries masters and codes of other weights than the model has: "
                    "load the model's state dict first, and then the optimizer's"
                )
        return parts

    def load(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Copy the state back, bit for bit."""
        for name, (t, _) in self.tensors.items():
            t.copy_(parts[name])
        for name, module in self.positions.items():
            module.restore_position(parts[name])


def _is_of(record: ParamState, prefix: str, saved: Mapping[str, torch.Tensor]) -> bool:
    """Whether a weight has the saved numbers, or what rounding them once more makes of these."""
    weight = record.require_weight()
    first, *others = weight.tensors
    names = {first: "stored"} | {name: f"weight.{name}" for name in others}
    scratch = weight.like(weight.cast)
    for name, t in scratch.tensors.items():
        t.copy_(saved[prefix + names[name]].view(t.dtype))
    values, now = scratch.read().clone(), weight.read()
    scratch.write(values)  # on every process, as the processes with its shards compute its scale together
    return any(torch.allclose(x, now, rtol=0, atol=0, equal_nan=True) for x in (values, scratch.read()))


def as_saved(t: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A tensor of a parameter's state for a state dict; not copied."""
    t = t.view(torch.uint8) if t.element_size() == 1 else t  # gloo sends no FP8
    if not isinstance(p, DTensor) or not t.ndim:
        return t
    if len(t) != len(local_tensor(p)):
        raise UserError(
            "torch.distributed.checkpoint cannot divide scales of blocks of several rows among processes: "
            "let each process save its own narrowgauge.state_dict(model, optimizer)"
        )
    return _dtensor(t, p, p.placements, p.shape[0])


def as_row(t: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A tensor of which each process has its own, for a state dict."""
    if not isinstance(p, DTensor):
        return t
    mesh = p.device_mesh
    return _dtensor(t[None], p, [Shard(0)] * mesh.ndim, mesh.size())


def as_kept(saved: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of this process of what a state dict holds, in the shape and dtype that are kept."""
    local = local_tensor(saved)
    if local.dtype == torch.uint8 and like.element_size() == 1:
        local = local.view(like.dtype)
    return local.view(like.shape) if local.numel() == like.numel() else local


def _dtensor(t: torch.Tensor, p: DTensor, placements: Sequence[Placement], length: int) -> torch.Tensor:
    """A DTensor of `length` rows, of which this process has `t`."""
    shape = torch.Size((length, *t.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        t.contiguous(), p.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def from_torch(
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
