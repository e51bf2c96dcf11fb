"""The linear layers that a recipe may replace: those that compute `x @ w.T + b`, and nothing else.

A layer whose class overrides `forward` is tested: it computes the matmul of test values. If the result is
that of a linear layer (nanochat's casts its weight to the dtype of the input), a matmul under the recipe may
replace it. If it is anything else (the routers of Llama 4 and Phi-MoE return tuples), the layer stays as it
is. So does one whose forward method was replaced on the instance, as adapters do: it may be a plain matmul
now, but not after a step.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from narrowgauge.errors import UserError
from narrowgauge.nn.linear import Linear
from narrowgauge.torch_compat import without_hooks

_ROWS = 3  # test inputs
_TOLERANCE = 0.01  # relative to the result's norm: a matmul with bf16 operands is within 0.4 %


def untouched_layers(layers: Mapping[str, torch.nn.Module]) -> list[str]:
    """The names of the layers that stay as they are; a single warning lists them all by kind.

    Args:
        layers: Linear layers by name.

    Raises:
        UserError: A layer has tensors besides weight and bias, a computed weight, or no values yet; or the
            forward method of a layer under a recipe was replaced.

    Warns:
        UserWarning: Some layers stay as they are; or a matmul under the recipe replaces the forward method
            of some.
    """
    patched: dict[str, list[str]] = {}
    other: dict[str, list[str]] = {}
    replaced: dict[str, list[str]] = {}
    for name, layer in layers.items():
        kind = type(layer).__name__
        if "forward" in vars(layer):
            if isinstance(layer, Linear):
                raise UserError(
                    f"the forward pass of layer {name!r} was replaced after its conversion, and another "
                    "conversion would drop what it does: take it off first (del layer.forward)"
                )
            patched.setdefault(kind, []).append(name)
            continue
        _require_parameter(name, layer)
        if isinstance(layer, Linear) or not isinstance(layer, torch.nn.Linear):
            continue
        answer = True if type(layer).forward is torch.nn.Linear.forward else _is_product(layer)
        if answer is not None:  # a router may have additional tensors, and keeps them
            _require_plain(name, layer)
        if not answer:
            other.setdefault(kind, []).append(name)
        elif type(layer).forward is not torch.nn.Linear.forward:
            replaced.setdefault(kind, []).append(name)
    _warn(patched, other, replaced)
    return [name for found in (patched, other) for names in found.values() for name in names]


def _warn(
    patched: Mapping[str, Sequence[str]],
    other: Mapping[str, Sequence[str]],
    replaced: Mapping[str, Sequence[str]],
) -> None:
    """Report in one warning which layers stay, and which forward methods a recipe replaces."""
    parts = []
    if patched:
        parts.append(
            f"{_named(patched)} had its forward pass replaced on the instance, and stays as it is: convert "
            "the model first, and put adapters on afterwards"
        )
    if other:
        parts.append(
            f"{_named(other)} overrides the forward pass and computes something else than a linear layer, "
            "and stays as it is"
        )
    if replaced:
        parts.append(
            f"{_named(replaced)} overrides the forward pass but computes the matmul of a linear layer, and a "
            "matmul under the recipe replaces it"
        )
    if parts:
        warnings.warn("; ".join(parts), stacklevel=4)


def _named(found: Mapping[str, Sequence[str]]) -> str:
    """The layers by kind: `layer 'router' (Router)`, `each of 15 layers such as 'a' (Linear)`."""
    names = [name for each in found.values() for name in each]
    kinds = ", ".join(found)
    if len(names) == 1:
        return f"layer {names[0]!r} ({kinds})"
    return f"each of {len(names)} layers such as {names[0]!r} ({kinds})"


def _require_parameter(name: str, layer: torch.nn.Module) -> None:
    if not isinstance(layer.weight, torch.nn.Parameter):
        raise UserError(
            f"the weight of {name or 'the model'} is not a parameter but computed from others, which a "
            "recipe cannot see; take the parametrization off first (torch.nn.utils.parametrize)"
        )


def _require_plain(name: str, layer: torch.nn.Linear) -> None:
    """Refuse a kind of `torch.nn.Linear` that has more than its weight and its bias.

    Raises:
        UserError: It has additional tensors or modules, which a layer under a recipe would leave behind.
    """
    tensors = {n.partition(".")[0] for n, _ in (*layer.named_parameters(), *layer.named_buffers())}
    own = sorted(tensors - {"weight", "bias"})
    if own or isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin):
        has = f"also has {own[0]!r}" if own else "has no values yet"
        raise UserError(
            f"layer {name!r} is a {type(layer).__name__} that {has}, which a recipe would leave behind: "
            "convert the model while it is a torch.nn.Linear with values, and put adapters on afterwards"
        )


@torch.no_grad()
def _is_product(layer: torch.nn.Linear) -> bool | None:
    """Whether a layer computes the matmul of a linear layer; None if its result does not even have that form.

    A copy of the layer without hooks is tested, with other values in its weight and bias: its own may be
    zeros. The state of torch's generators is preserved. On the meta device only the form is checked.
    """
    weight, bias = layer.weight, layer.bias
    devices = [weight.device] if weight.device.type == "cuda" else []
    try:
        rows, columns = (_numbers(n, weight) for n in weight.shape)
        parameters = {"weight": rows[:, None] * columns}
        parameters |= {} if bias is None else {"bias": _numbers(len(bias), bias)}
        x = _numbers(_ROWS, weight)[:, None] + _numbers(layer.in_features, weight)
        wanted = torch.nn.functional.linear(x, **parameters).float()
        with torch.random.fork_rng(devices):
            found: Any = type(layer).forward(without_hooks(layer, parameters), x)  # type: ignore[arg-type]
    except Exception:  # it needs more than one input, or other shapes: not a linear layer
        return None
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape:
        return None
    if found.is_meta:
        return True
    return bool((found.float() - wanted).norm() <= _TOLERANCE * wanted.norm())


def _numbers(count: int, like: torch.Tensor) -> torch.Tensor:
    """Some values of either sign, in the dtype and on the device of a tensor."""
    return (torch.arange(count, device=like.device, dtype=torch.float32) * 0.7 + 0.3).sin().to(like.dtype)
