"""The matmul weights of a model that a recipe reaches, and those that it leaves as they are.

A recipe replaces `torch.nn.Linear`, the `Conv1D` of transformers and stacked experts. What it leaves, because
it cannot know how the weight is used:

    a subclass of torch.nn.Linear with a forward method of its own, unless `also` names it as a plain matmul
    a layer whose forward method was replaced on the instance, as adapters do: it may compute more tomorrow
    a parameter of two or more dimensions elsewhere: convolutions, torch's attention and recurrent layers,
    modules that call `torch.nn.functional.linear`
    a layer in a plain Python list, where torch finds no modules

Norms and tables are no matmul weights: those of embeddings, also by name ("embed"), and a stack of a single
matrix, which is how an image's positions are stored.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from narrowgauge.nn.linear import Linear
from narrowgauge.nn.transformer.outline import is_linear
from narrowgauge.nn.transformer.stacked_experts import is_stacked
from narrowgauge.system.errors import UserError

_SILENT_BELOW = 0.05  # of the elements of all matmul weights: routers, gates, the patches of an image
Kinds = Collection[type[torch.nn.Module]]


class MatmulWeight(NamedTuple):
    """A weight: its name, its elements, and why a recipe leaves it as it is ("" if it does not)."""

    name: str
    elements: int
    why: str


def untouched_layers(layers: Mapping[str, torch.nn.Module], also: Kinds = ()) -> list[str]:
    """The names of the layers that stay as they are.

    Args:
        layers: Linear layers by name.
        also: Subclasses of `torch.nn.Linear` whose forward method is a plain matmul.
    """
    found = []
    for name, layer in layers.items():
        if "forward" in vars(layer) and isinstance(layer, Linear):
            raise UserError(
                f"the forward pass of layer {name!r} was replaced after its conversion, and another "
                "conversion would drop what it does: take it off first (del layer.forward)"
            )
        if why_left(layer, also):
            found.append(name)
            continue
        if not isinstance(layer.weight, torch.nn.Parameter):
            raise UserError(
                f"the weight of {name or 'the model'} is not a parameter but computed from others, which a "
                "recipe cannot see; take the parametrization off first (torch.nn.utils.parametrize)"
            )
        tensors = {n.partition(".")[0] for n, _ in (*layer.named_parameters(), *layer.named_buffers())}
        own = sorted(tensors - {"weight", "bias"})
        if (own or is_lazy(layer.weight)) and not isinstance(layer, Linear):
            has = f"also has {own[0]!r}" if own else "has no values yet"
            raise UserError(
                f"layer {name!r} is a {type(layer).__name__} that {has}, which a recipe would leave behind: "
                "convert the model while it is a torch.nn.Linear with values, and put adapters on afterwards"
            )
    return found


def why_left(layer: torch.nn.Module, also: Kinds = ()) -> str:
    """Why a recipe leaves a linear layer as it is; "" if it does not."""
    if "forward" in vars(layer):
        return _REPLACED
    if isinstance(layer, Linear) or not isinstance(layer, torch.nn.Linear):
        return ""
    is_own = type(layer).forward is not torch.nn.Linear.forward and not isinstance(layer, tuple(also))
    return f"{type(layer).__name__} overrides the forward pass" if is_own else ""


_REPLACED = "its forward pass was replaced (convert the model first, and put adapters on afterwards)"
_IN_LIST = (
    "it lies in a plain Python list, where neither a recipe nor .to() nor model.parameters() reaches it "
    "(make the list a torch.nn.ModuleList)"
)


def matmul_weights(model: torch.nn.Module, also: Kinds = ()) -> Iterator[MatmulWeight]:
    """Each weight of a model once, those that other code multiplies with included."""
    seen: set[torch.nn.Parameter] = set()
    for name, module in sorted(model.named_modules(), key=lambda pair: not is_linear(pair[1])):
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        for key, p in module.named_parameters(recurse=False):
            if p in seen or is_lazy(p) or not _is_matrix(module, f"{name}.{key}", p):
                continue
            seen.add(p)
            if is_linear(module):
                yield MatmulWeight(name, p.numel(), why_left(module, also))
            else:
                why = "" if is_stacked(module) else f"{type(module).__name__} multiplies with it"
                yield MatmulWeight(f"{name}.{key}".lstrip("."), p.numel(), why)
    for name, layer in _hidden_layers(model):
        yield MatmulWeight(name, layer.weight.numel(), _IN_LIST)


def _is_matrix(module: torch.nn.Module, name: str, p: torch.Tensor) -> bool:
    """Whether a parameter may be the weight of a matmul, by its shape and its name."""
    if is_linear(module):
        return name.endswith(".weight")
    is_norm = "norm" in type(module).__name__.lower()
    is_table = is_norm or "embed" in name.lower() or (p.ndim == 3 and p.shape[0] == 1)
    return sum(size > 1 for size in p.shape) > 1 and not is_table


def warn_of_left(model: torch.nn.Module) -> None:
    """Report in one warning what a recipe leaves of a model, unless it is almost nothing.

    Layers in plain lists, and those whose forward method was replaced, are always reported: these are
    mistakes.
    """
    weights = list(matmul_weights(model))
    left = [w for w in weights if w.why]
    share = sum(w.elements for w in left) / max(1, sum(w.elements for w in weights))
    if share >= _SILENT_BELOW or any(w.why in (_REPLACED, _IN_LIST) for w in left):
        warnings.warn(
            f"converted {len(weights) - len(left)} of {len(weights)} matmul weights of "
            f"{type(model).__name__}; {share:.0%} of their elements stay as they are: {reasons(left)}. A "
            "recipe reaches torch.nn.Linear, subclasses named in convert(..., also=...) whose forward pass "
            "is a plain matmul, and experts as transformers 5 holds them; narrowgauge.audit(model) lists all",
            stacklevel=4,
        )


def reasons(left: Iterable[MatmulWeight]) -> str:
    """The weights by the reason to leave them, with the largest of each as an example."""
    found: dict[str, list[MatmulWeight]] = {}
    for weight in sorted(left, key=lambda w: -w.elements):
        found.setdefault(weight.why, []).append(weight)
    return "; ".join(f"{len(each)} such as {each[0].name!r}, because {why}" for why, each in found.items())


def _hidden_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    """The trainable linear layers of modules in lists, tuples and dictionaries that torch does not see."""
    modules, known = set(model.modules()), set(model.parameters())
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _TORCHS or not isinstance(value, list | tuple | dict):
                continue
            for path, hidden in _modules_in(value, f"{name}.{key}".lstrip(".")):
                for inner, layer in hidden.named_modules() if hidden not in modules else ():
                    is_own = isinstance(layer, torch.nn.Linear) and layer.weight not in known
                    if is_own and layer.weight.requires_grad:
                        yield f"{path}.{inner}".rstrip("."), layer


# What torch keeps in a module's dictionaries: hooks may hold modules.
_TORCHS = set(vars(torch.nn.Module()))


def _modules_in(value: Any, path: str, depth: int = 3) -> Iterator[tuple[str, torch.nn.Module]]:
    """(path, module) of each module in a list, tuple or dictionary, including nested ones."""
    if isinstance(value, torch.nn.Module):
        yield path, value
    elif depth and isinstance(value, list | tuple | dict):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in pairs:
            yield from _modules_in(entry, f"{path}[{key!r}]", depth - 1)
