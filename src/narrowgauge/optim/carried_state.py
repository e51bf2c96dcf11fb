"""What a recipe keeps for a parameter, as the optimizer's state dict carries it.

The model's state dict holds plain float32 weights, which any program reads. Checkpoints of other programs
(accelerate, Lightning, torch's DCP) hold that and the optimizer's state dict by parameter, and nothing else.
So the optimizer's state of a parameter includes what a resume to the same digits needs:

    recipe.stored               the codes of a weight in a cast
    recipe.weight.*, .master.*  its scales, and its master
    recipe.I.PLACE.*            histories of the I-th layer that multiplies with it, such as delayed scales
    recipe.I.position           the step of that layer, and the keys of its random streams
    recipe.others.*             the same of modules without a weight in the optimizer: frozen layers, experts
                                in one parameter, attention, the residual stream; with the first parameter

Codes and master go only into a model that already has the weights they belong to: an optimizer's state dict
never changes what `model.load_state_dict` has loaded by more than the rounding of its format. Weights that
are loaded once more leave them alone (torch's `set_state_dict` loads the model last).
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from narrowgauge.errors import UserError, require
from narrowgauge.nn.linear import Linear
from narrowgauge.nn.loop_checks import counting_layers
from narrowgauge.nn.step_state import Stepped
from narrowgauge.optim.sharded_state import as_kept, as_row, as_saved
from narrowgauge.quantization import ParamState, state_of, stored_tensor

PREFIX = "recipe."  # of the names in a parameter's state
POSITION = "position"

Layers = Mapping[int, Mapping[str, Stepped]]  # by the id of the weight that carries them, and by name


def layers_of(parameters: Iterable[torch.Tensor]) -> Layers:
    """The converted layers that multiply with each parameter, in their order in the model.

    The first parameter that has any also carries the modules that were converted together with them and that
    no parameter has. A second `convert` makes other layers; the first ones may live on, and do not count.
    """
    found: dict[int, dict[int, Linear]] = {id(p): {} for p in parameters}
    for layer in counting_layers():
        if isinstance(layer, Linear) and (key := id(_weight_of(layer))) in found:
            found[key][layer.index] = layer
    carried: dict[int, dict[str, Stepped]] = {}
    for key, layers in found.items():
        carried[key] = {str(n): layers[i] for n, i in enumerate(sorted(layers))}
    rest = {m.conversion: set(m.conversion.modules) for m in _all(carried) if m.conversion is not None}
    for layers_of_one in carried.values():
        for module in [*layers_of_one.values()]:
            others = rest.pop(module.conversion, set()) if module.conversion is not None else set()
            by_name = {f"others.{type(m).__name__}.{m.index}": m for m in others.difference(_all(carried))}
            layers_of_one |= dict(sorted(by_name.items()))
    return carried


def _weight_of(layer: Linear) -> torch.Tensor | None:
    """The parameter that a layer multiplies with; None if it is computed, or a slice of another."""
    return dict(layer.named_parameters(recurse=False)).get("weight")


def _all(carried: Layers) -> list[Stepped]:
    return [module for layers in carried.values() for module in layers.values()]


class _Kept(NamedTuple):
    """A tensor of the model with state of a recipe, and the parameter that it is sharded with."""

    tensor: torch.Tensor
    of: torch.Tensor
    is_row: bool = False  # each process has its own

    def saved(self) -> torch.Tensor:
        copied = self.tensor.clone()
        return as_row(copied, self.of) if self.is_row else as_saved(copied, self.of)


def carried_tensors(p: torch.Tensor, layers: Layers) -> dict[str, torch.Tensor]:
    """The recipe's state of a parameter by name, copied, because loading the model's weights changes it."""
    own = {f"{PREFIX}{name}.{POSITION}": m.position() for name, m in _stepped(p, layers)}
    return own | {name: kept.saved() for name, kept in _tensors(p, layers).items()}


def _tensors(p: torch.Tensor, layers: Layers) -> dict[str, _Kept]:
    """The tensors of the model that hold the recipe's state of a parameter."""
    tensors: dict[str, _Kept] = {}
    for prefix, weight in _weights(p, layers).items():
        record = state_of(weight)
        kept = record.tensors() | ({} if record.weight is None else {"stored": stored_tensor(weight)})
        tensors |= {f"{prefix}{name}": _Kept(t, weight) for name, t in kept.items()}
    for i, layer in _stepped(p, layers):
        for place, history in layer.histories.items():
            tensors |= {f"{i}.{place}.{name}": _Kept(t, p, True) for name, t in history.tensors().items()}
        if isinstance(layer, Linear) and layer.reduce_prescale is not None:
            factor = layer.reduce_prescale.tensors
            tensors |= {f"{i}.reduce.{name}": _Kept(t, p) for name, t in factor.items()}
    return {PREFIX + name: kept for name, kept in tensors.items()}


def _weights(p: torch.Tensor, layers: Layers) -> dict[str, torch.Tensor]:
    """A parameter and the weights that it carries, each with the first part of the names of its state."""
    carried = {name: _weight_of(m) for name, m in layers[id(p)].items() if isinstance(m, Linear)}
    others = {f"{name}.": w for name, w in carried.items() if w is not None and w is not p}
    return {"": p, **others}


def _stepped(p: torch.Tensor, layers: Layers) -> list[tuple[str, Stepped]]:
    """The modules that a parameter carries and whose values depend on the step, by name."""
    return [(name, module) for name, module in layers[id(p)].items() if module.follows_step()]


def local_parts(
    p: torch.Tensor, layers: Layers, saved: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What this process keeps of a saved state of a parameter's recipe."""
    kept = {name: k.tensor for name, k in _tensors(p, layers).items()}
    kept |= {f"{PREFIX}{name}.{POSITION}": m.position() for name, m in _stepped(p, layers)}
    parts = {name: as_kept(t, kept[name]) if name in kept else t for name, t in saved.items()}
    require_same_tensors(kept, parts)
    for prefix, weight in _weights(p, layers).items():
        record = state_of(weight)
        if record.weight is None or _is_of(record, PREFIX + prefix, parts):
            continue
        raise UserError(
            "the optimizer's state carries masters and codes of other weights than the model has: load the "
            "model's state dict first, and then the optimizer's"
        )
    return parts


def load_carried(p: torch.Tensor, layers: Layers, parts: Mapping[str, torch.Tensor]) -> None:
    """Copy the recipe's state of a parameter back, bit for bit, if any was saved."""
    for name, kept in _tensors(p, layers).items() if parts else ():
        kept.tensor.copy_(parts[name])
    for i, layer in _stepped(p, layers) if parts else ():
        layer.restore_position(parts[f"{PREFIX}{i}.{POSITION}"])


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


def require_same_tensors(current: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Require the same names, shapes and dtypes; the error names the first difference."""
    for key in sorted(current.keys() | saved.keys()):
        require(f"{key!r} of the state", saved.get(key, current.get(key)), torch.Tensor)
        both = (f"{s[key].dtype} {tuple(s[key].shape)}" if key in s else "absent" for s in (saved, current))
        there, here = both
        if here != there:
            raise UserError(
                f"the state is of another model or recipe: {key!r} is {there} there and {here} here; use the "
                "model and recipe that it was saved with"
            )
