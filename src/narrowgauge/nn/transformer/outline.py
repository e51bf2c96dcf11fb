"""The outline of any torch model: linear layers, repeated blocks, the output layer, and what a recipe leaves.

Blocks are the members of the outermost stacks, stack after stack, and a recipe's shares count all of them
together. Stacks stand in the order in which a module's forward method names them, where it names them all (a
UNet registers `mid_block` after `up_blocks`, and computes it before), else in the order of the model. So the
last blocks are those next to the output: of an encoder and a decoder the decoder's, however many that are.
`narrowgauge.audit(model, recipe)` lists the choice. A stack is the first of these kinds that the model has:

    1. a ModuleList, or a ModuleDict with numbers for keys, of modules that hold linear layers; and the
       members of one class in a Sequential, if there are several
    2. modules of one class whose names differ in a number: block1, block2
    3. a list of plain linear layers

Nothing inside a block counts as a stack, so experts, heads and the halves of a layer are not counted; a list
called `experts` never is.

The output head is every linear layer that shares its weight with an embedding; else those outside the blocks
with as many outputs as the largest embedding has rows; else the last one after the blocks.

A recipe replaces `torch.nn.Linear`, the `Conv1D` of transformers and stacked experts. What it leaves, because
it cannot know how the weight is used:

    a subclass of torch.nn.Linear with a forward method of its own, unless `also` names it as a plain matmul
    a layer whose forward method was replaced on the instance, as adapters do: it may compute more tomorrow
    a parameter of two or more dimensions elsewhere: convolutions, torch's attention and recurrent layers,
    modules that call `torch.nn.functional.linear`
    a layer in a plain Python list, where torch finds no modules

The audit does not count norms and tables as matmul weights: embeddings, found also by name ("embed"), and a
stack of a single matrix, as vision models store positions.
"""

import inspect
import re
import warnings
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from narrowgauge.kernels.attention import Attention
from narrowgauge.nn.linear import Linear
from narrowgauge.nn.transformer.stacked_experts import ExpertLinear, expert_layers, is_stacked
from narrowgauge.recipes import HEAD, Outline
from narrowgauge.system.errors import UserError

_SILENT_BELOW = 0.05  # of the elements of all matmul weights: routers, gates, the patches of an image
_REPLACED = "its forward pass was replaced (convert the model first, and put adapters on afterwards)"
_IN_LIST = (
    "it lies in a plain Python list, where neither a recipe nor .to() nor model.parameters() reaches it "
    "(make the list a torch.nn.ModuleList)"
)
Kinds = Collection[type[torch.nn.Module]]


def outline_of(model: torch.nn.Module, untouched: Container[str] = ()) -> Outline:
    """The names of a model that rules of a recipe select from.

    Args:
        model: The full model, converted or not.
        untouched: The names of linear layers that no recipe may replace.
    """
    layers = linear_layers(model)
    blocks = next(filter(None, (_outermost(model, "", kind) for kind in (1, 2, 3))), [])
    number_of = {block: number for number, block in enumerate(blocks)}

    def named(name: str) -> tuple[str, int | None]:
        return name, _block_number(name, number_of)

    names: dict[torch.nn.Module, list[tuple[str, int | None]]] = {}
    for name, layer in layers.items():
        if name not in untouched:
            names.setdefault(layer, []).append(named(name))
    found: dict[str, Sequence[tuple[str, int | None]]] = {each[0][0]: each for each in names.values()}
    for layer in {layers[name] for name in _heads(model, layers, number_of)} & names.keys():
        names[layer].append((HEAD, None))
    shapes = {name: _shape(layer) for name, layer in layers.items()}
    modules = dict(model.named_modules())
    for stack, experts in modules.items():
        if is_stacked(experts):
            of_stack = {f"{stack}.{number}.{key}": shape for number, key, shape in expert_layers(experts)}
            found |= {name: [named(name)] for name in of_stack}
            shapes |= of_stack
    return Outline(
        layers=found,
        shapes={name: shape for name, shape in shapes.items() if name in found},
        blocks=blocks,
        attention={name: [named(name)] for name, m in modules.items() if isinstance(m, Attention)},
        owners={name: [named(name)] for name, m in modules.items() if [*m.parameters(recurse=False)]},
        untouched=tuple(name for name in layers if name in untouched),
    )


def linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The linear layers of a model by name; one that it holds twice has two names."""
    return {name: m for name, m in model.named_modules(remove_duplicate=False) if is_linear(m)}


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a linear layer that a recipe can reach."""
    # The last is for MultiheadAttention, which reads the weight of its output layer and never calls it.
    is_other = isinstance(module, NonDynamicallyQuantizableLinear | ExpertLinear)
    return is_conv1d(module) or (isinstance(module, torch.nn.Linear) and not is_other)


def is_conv1d(module: torch.nn.Module) -> bool:
    """Whether this is Hugging Face's linear layer with a (K, N) weight (transformers is never imported)."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def _shape(layer: torch.nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer."""
    if isinstance(layer, torch.nn.Linear):
        return layer.out_features, layer.in_features
    inputs, outputs = layer.get_parameter("weight").shape
    return outputs, inputs


def _block_number(name: str, number_of: Mapping[str, int]) -> int | None:
    """The number of the block that a module is in, or is; None outside the blocks."""
    around = list(accumulate(name.split("."), "{}.{}".format))
    return next((number_of[outer] for outer in around if outer in number_of), None)


def _outermost(module: torch.nn.Module, name: str, kind: int) -> list[str]:
    """The names of the blocks in a module: members of stacks of a kind that are not inside another block."""
    below = module.named_modules(remove_duplicate=False)
    children = {key: child for key, child in below if key and "." not in key}
    keys, found = _members(kind, name, module, children), []
    for key, child in _in_order_of_use(module, children):
        path = f"{name}.{key}".lstrip(".")
        found += [path] if key in keys else _outermost(child, path, kind)
    return found


def _in_order_of_use(
    module: torch.nn.Module, children: Mapping[str, torch.nn.Module]
) -> list[tuple[str, torch.nn.Module]]:
    """The children of a module, in the order in which its forward method first names them.

    In the order of the model if it does not name each that holds linear layers.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    used = {name: place for place, name in enumerate(code.co_names)} if code else {}
    is_named = all(key in used or not _holds_linear(child) for key, child in children.items())
    return sorted(children.items(), key=lambda pair: used.get(pair[0], -1) if is_named else 0)


def _members(
    kind: int, name: str, module: torch.nn.Module, children: Mapping[str, torch.nn.Module]
) -> list[str]:
    """The members of a module that is a stack of a kind, 1 to 3; empty if it is none."""
    stems: dict[str, str] = {}  # of the names of modules, of which those of one class are a stack
    is_sequence = isinstance(module, torch.nn.Sequential)
    if kind == 3 or (kind == 1 and not is_sequence):
        has_any = any(map(is_linear if kind == 3 else _holds_linear, children.values()))
        return list(children) if has_any and _is_list(name, module) else []
    if kind == 1:
        stems = dict.fromkeys(children, "")
    elif not (is_sequence or isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)):
        stems = {key: re.sub(r"\d+", "", key) for key in children if re.search(r"\d", key)}
    alike: dict[tuple[object, ...], list[str]] = {}
    for key, stem in stems.items():
        member = children[key]
        if _holds_linear(member):
            # A container's class does not describe its contents.
            is_container = type(member).__module__ == torch.nn.Sequential.__module__
            inside = tuple(linear_layers(member)) if is_container else ()
            alike.setdefault((type(member), stem, inside), []).append(key)
    return [key for keys in alike.values() if len(keys) > 1 for key in keys]


def _is_list(name: str, module: torch.nn.Module) -> bool:
    is_numbered = isinstance(module, torch.nn.ModuleDict) and all(key.isdecimal() for key in module)
    is_of_experts = "expert" in name.rpartition(".")[2].lower()
    return (is_numbered or isinstance(module, torch.nn.ModuleList)) and not is_of_experts


def _holds_linear(module: torch.nn.Module) -> bool:
    """Whether a module, which is not a linear layer itself, contains any."""
    if is_linear(module):
        return False
    return any(isinstance(m, torch.nn.Linear) or is_conv1d(m) or is_stacked(m) for m in module.modules())


def _heads(
    model: torch.nn.Module, layers: Mapping[str, torch.nn.Module], number_of: Mapping[str, int]
) -> list[str]:
    """The names of those linear `layers` that produce the model's output; empty if it cannot be decided."""
    embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    tied = [name for name, layer in layers.items() if any(layer.weight is e.weight for e in embeddings)]
    if tied:
        return tied
    order = {name: place for place, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    end = max((order[name] for name in order if _block_number(name, number_of) is not None), default=-1)
    outside = [name for name in layers if _block_number(name, number_of) is None]
    rows = max((e.num_embeddings for e in embeddings), default=0)
    if of_vocabulary := [name for name in outside if _shape(layers[name])[0] == rows]:
        return of_vocabulary
    return [name for name in outside if order[name] > end][-1:] if number_of else []


class MatmulWeight(NamedTuple):
    """A weight: its name, its elements, and why a recipe leaves it as it is ("" if it does not)."""

    name: str
    elements: int
    why: str


def stays(name: str, layer: torch.nn.Module, also: Kinds = ()) -> bool:
    """Whether a linear layer stays as it is; refuses one that a recipe would break."""
    if "forward" in vars(layer) and isinstance(layer, Linear):
        raise UserError(
            f"the forward pass of layer {name!r} was replaced after its conversion, and another conversion "
            "would drop what it does: take it off first (del layer.forward)"
        )
    if why_left(layer, also):
        return True
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
    return False


def why_left(layer: torch.nn.Module, also: Kinds = ()) -> str:
    """Why a recipe leaves a linear layer as it is; "" if it does not."""
    if "forward" in vars(layer):
        return _REPLACED
    if isinstance(layer, Linear) or not isinstance(layer, torch.nn.Linear):
        return ""
    is_own = type(layer).forward is not torch.nn.Linear.forward and not isinstance(layer, tuple(also))
    return f"{type(layer).__name__} overrides the forward pass" if is_own else ""


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
