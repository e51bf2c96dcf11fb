"""The outline of any torch model: linear layers, repeated blocks, and the output layer.

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
"""

import inspect
import re
from collections.abc import Callable, Container, Mapping, Sequence

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgauge.kernels.attention import Attention
from narrowgauge.nn.transformer.stacked_experts import ExpertLinear, expert_layers, is_stacked
from narrowgauge.recipes import HEAD, Outline


def outline_of(model: torch.nn.Module, untouched: Container[str] = ()) -> Outline:
    """The names of a model that rules of a recipe select from.

    Args:
        model: The full model, converted or not.
        untouched: The names of linear layers that no recipe may replace.
    """
    layers = linear_layers(model)
    blocks = block_names(model)
    block_of = {block: number for number, block in enumerate(blocks)}
    heads = head_of(model, layers, blocks)
    names: dict[torch.nn.Module, list[tuple[str, int | None]]] = {}
    first: dict[torch.nn.Module, str] = {}
    for name, layer in layers.items():
        if name not in untouched:
            first.setdefault(layer, name)
            names.setdefault(layer, []).append((name, block_number(name, block_of)))
    for layer in {layers[name] for name in heads} & names.keys():
        names[layer].append((HEAD, None))
    found: dict[str, Sequence[tuple[str, int | None]]] = {first[layer]: each for layer, each in names.items()}
    shapes = {name: _shape(layer) for name, layer in layers.items()}
    modules = dict(model.named_modules())
    for stack, experts in modules.items():
        if is_stacked(experts):
            of_stack = {f"{stack}.{number}.{key}": shape for number, key, shape in expert_layers(experts)}
            found |= {name: [(name, block_number(name, block_of))] for name in of_stack}
            shapes |= of_stack
    return Outline(
        layers=found,
        shapes={name: shape for name, shape in shapes.items() if name in found},
        blocks=blocks,
        attention={
            name: [(name, block_number(name, block_of))]
            for name, m in modules.items()
            if isinstance(m, Attention)
        },
        owners={
            name: [(name, block_number(name, block_of))]
            for name, m in modules.items()
            if next(m.parameters(recurse=False), None) is not None
        },
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


def block_names(model: torch.nn.Module) -> list[str]:
    """The names of a model's repeated blocks, in order."""
    children: Children = {}
    for name, module in model.named_modules(remove_duplicate=False):
        children.setdefault(name, {})
        if name:
            parent, _, key = name.rpartition(".")
            children.setdefault(parent, {})[key] = module
    for members in (_members_of_list, _numbered, _members_of_plain_list):
        if found := _outermost(model, "", children, members):
            return found
    return []


def block_number(name: str, blocks: Mapping[str, int]) -> int | None:
    """The number of the block that a module is in, or is; None outside the blocks."""
    words = name.split(".")
    return next(
        (n for i in range(len(words)) if (n := blocks.get(".".join(words[: i + 1]))) is not None), None
    )


#: The children of each module by its name, including repeated ones.
Children = dict[str, dict[str, torch.nn.Module]]


def _outermost(
    module: torch.nn.Module,
    name: str,
    children: Children,
    members: Callable[[str, torch.nn.Module, Mapping[str, torch.nn.Module]], Sequence[str]],
) -> list[str]:
    """The names of the blocks in a module: members of stacks that are not inside another block."""
    keys, found = members(name, module, children[name]), []
    for key, child in _in_order_of_use(module, children[name]):
        path = f"{name}.{key}".lstrip(".")
        found += [path] if key in keys else _outermost(child, path, children, members)
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


def _members_of_list(
    name: str, module: torch.nn.Module, members: Mapping[str, torch.nn.Module]
) -> Sequence[str]:
    """The blocks among the members of a list or a sequence."""
    if _is_list(name, module):
        return list(members) if any(_holds_linear(m) for m in members.values()) else []
    return _alike(members, lambda key: "") if isinstance(module, torch.nn.Sequential) else []


def _numbered(name: str, module: torch.nn.Module, members: Mapping[str, torch.nn.Module]) -> Sequence[str]:
    """The blocks among modules with numbers in their names."""
    if isinstance(module, torch.nn.Sequential | torch.nn.ModuleList | torch.nn.ModuleDict):
        return []
    numbered = {key: m for key, m in members.items() if re.search(r"\d", key)}
    return _alike(numbered, lambda key: re.sub(r"\d+", "", key))


def _members_of_plain_list(
    name: str, module: torch.nn.Module, members: Mapping[str, torch.nn.Module]
) -> Sequence[str]:
    """The members of a list of linear layers."""
    return list(members) if _is_list(name, module) and any(is_linear(m) for m in members.values()) else []


def _alike(members: Mapping[str, torch.nn.Module], stem: Callable[[str], str]) -> list[str]:
    """The members with linear layers, where several share a class and the stem of their names."""
    kinds: dict[tuple[object, ...], list[str]] = {}
    for key, member in members.items():
        if _holds_linear(member):
            # A container's class does not describe its contents.
            is_container = type(member).__module__ == torch.nn.Sequential.__module__
            inside = tuple(linear_layers(member)) if is_container else ()
            kinds.setdefault((type(member), stem(key), inside), []).append(key)
    return [key for keys in kinds.values() if len(keys) > 1 for key in keys]


def _is_list(name: str, module: torch.nn.Module) -> bool:
    is_numbered = isinstance(module, torch.nn.ModuleDict) and all(key.isdecimal() for key in module)
    is_of_experts = "expert" in name.rpartition(".")[2].lower()
    return (is_numbered or isinstance(module, torch.nn.ModuleList)) and not is_of_experts


def _holds_linear(module: torch.nn.Module) -> bool:
    """Whether a module, which is not a linear layer itself, contains any."""
    if is_linear(module):
        return False
    return any(isinstance(m, torch.nn.Linear) or is_conv1d(m) or is_stacked(m) for m in module.modules())


def head_of(
    model: torch.nn.Module, layers: Mapping[str, torch.nn.Module], blocks: Sequence[str]
) -> list[str]:
    """The names of those linear `layers` that produce the model's output; empty if it cannot be decided.

    `blocks` are the names of the model's repeated blocks.
    """
    embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    tied = [name for name, layer in layers.items() if any(layer.weight is e.weight for e in embeddings)]
    if tied:
        return tied
    numbers = {block: number for number, block in enumerate(blocks)}
    order = {name: place for place, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    end = max((order[name] for name in order if block_number(name, numbers) is not None), default=-1)
    outside = [name for name in layers if block_number(name, numbers) is None]
    rows = max((e.num_embeddings for e in embeddings), default=0)
    if of_vocabulary := [name for name in outside if _shape(layers[name])[0] == rows]:
        return of_vocabulary
    return [name for name in outside if order[name] > end][-1:] if blocks else []
