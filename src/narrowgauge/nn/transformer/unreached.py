"""Which matrices of a model no recipe reaches: `convert` says so, as they would stay wide without a word."""

import warnings
from collections.abc import Iterator

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgauge.nn.transformer.stacked_experts import StackedExperts

_WITHOUT_LAYERS = (torch.nn.MultiheadAttention, NonDynamicallyQuantizableLinear, torch.nn.RNNBase)


def warn_of_unreached(model: torch.nn.Module) -> None:
    """Say which share of a model's parameters is in matrices that compute as before.

    These are the weights of torch's own attention and recurrent layers, which multiply without a
    `torch.nn.Linear`, and stacked matrices that are not those of `StackedExperts`.
    """
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
            # Positions of an image are a stack of one matrix.
            is_stack = not is_torchs and p.ndim == 3 and p.shape[0] > 1
            if is_stack or (is_without and p.ndim == 2):
                yield f"{name}.{key}".lstrip("."), p.numel()
