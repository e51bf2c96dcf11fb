"""The matrices of a model that no recipe reaches: `convert` warns, because they would silently stay wide."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgauge.nn.transformer.stacked_experts import StackedExperts

_WITHOUT_LAYERS = (torch.nn.MultiheadAttention, NonDynamicallyQuantizableLinear, torch.nn.RNNBase)


def warn_of_unreached(model: torch.nn.Module) -> None:
    """Report which share of a model's parameters is in matrices that compute as before.

    These are the weights of torch's attention and recurrent layers, which multiply without a
    `torch.nn.Linear`, stacked matrices outside `StackedExperts`, and layers in plain lists.
    """
    if hidden := list(hidden_layers(model)):
        warnings.warn(f"{hidden_text(hidden)}, and stay as they are", stacklevel=3)
    found = dict(_unreached(model))
    if not found:
        return
    share = sum(found.values()) / sum(p.numel() for p in model.parameters())
    warnings.warn(
        f"{share:.0%} of the parameters of {type(model).__name__} are in matrices that no recipe reaches, "
        f"such as {next(iter(found))!r}: they compute in their own dtype. A recipe reaches torch.nn.Linear, "
        "and experts as transformers 5 holds them",
        stacklevel=3,
    )


def _unreached(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    """(name, elements) of each such matrix."""
    for name, module in model.named_modules():
        is_without = isinstance(module, _WITHOUT_LAYERS)
        is_torchs = isinstance(module, StackedExperts) or type(module).__module__.startswith("torch.nn.")
        for key, p in module.named_parameters(recurse=False):
            # An image's position table is a stack of a single matrix.
            is_stack = not is_torchs and p.ndim == 3 and p.shape[0] > 1
            if is_stack or (is_without and p.ndim == 2):
                yield f"{name}.{key}".lstrip("."), p.numel()


def hidden_text(hidden: Sequence[str]) -> str:
    """The layers in plain lists, and the way out."""
    return (
        f"{len(hidden)} linear layers, such as {hidden[0]!r}, lie in plain Python lists, where torch finds "
        "no modules: neither a recipe nor .to() nor model.parameters() reaches them (make the list a "
        "torch.nn.ModuleList)"
    )


def hidden_layers(model: torch.nn.Module) -> Iterator[str]:
    """The trainable linear layers of modules in lists, tuples and dictionaries that torch does not see."""
    modules = set(model.modules())
    known = set(model.parameters())
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _TORCHS or not isinstance(value, list | tuple | dict):
                continue
            for path, hidden in _modules_in(value, f"{name}.{key}".lstrip(".")):
                if hidden in modules:
                    continue
                for inner, layer in hidden.named_modules():
                    is_linear = isinstance(layer, torch.nn.Linear) and layer.weight not in known
                    if is_linear and layer.weight.requires_grad:
                        yield f"{path}.{inner}".rstrip(".")


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
