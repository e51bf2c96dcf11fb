"""Ensures that nothing non-finite is published.

A NaN in a checkpoint outlives the run that produced it: every resume starts from it. The check is therefore
here, just before the write, whatever the training loop has checked before.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from narrowgauge.system.errors import Failed, UserError

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
Tensors: TypeAlias = Mapping[str, Mapping[str, torch.Tensor]]  # group -> name -> tensor


class PoisonedError(UserError, Failed):
    """A tensor or value to be saved is not finite."""

    exit_code = 1


def refuse_non_finite(tensors: Tensors, state: Mapping[str, JSON]) -> None:
    """Refuse tensors and values that are not finite; the `PoisonedError` names the first of them."""
    bad = [
        f"tensor {name!r} of {group!r}"
        for group, named in tensors.items()
        for name, tensor in named.items()
        if not is_finite(tensor)
    ]
    bad += [f"state{key}" for key in _non_finite_numbers(state)]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise PoisonedError(
            f"not saved: {bad[0]}{more} holds a NaN or an infinity, and nothing non-finite is ever "
            f"published; go back to the last checkpoint"
        )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is a NaN or an infinity: one pass, without a temporary of the tensor's size."""
    t = tensor.detach()
    if t.is_complex():
        t = torch.view_as_real(t)
    if not t.is_floating_point() or t.numel() == 0 or t.dtype is torch.float4_e2m1fn_x2:  # FP4 is all finite
        return True
    if t.element_size() == 1:  # FP8 has no minimum in torch: count the codes, and look up the non-finite ones
        counts = torch.bincount(t.contiguous().view(torch.uint8).flatten(), minlength=256)
        codes = torch.arange(256, dtype=torch.uint8, device=t.device)
        return not counts[~codes.view(t.dtype).float().isfinite()].any()
    low, high = torch.aminmax(t)  # a NaN anywhere makes both NaN
    return math.isfinite(low) and math.isfinite(high)


def _non_finite_numbers(value: JSON, key: str = "") -> list[str]:
    """Locations, written as in Python (`['a'][0]`), of the floats that are not finite."""
    if isinstance(value, float):
        return [] if math.isfinite(value) else [key]
    if isinstance(value, Mapping):
        assert all(isinstance(name, str) for name in value), "JSON turns other keys into strings"
        return [p for name, v in value.items() for p in _non_finite_numbers(v, f"{key}[{name!r}]")]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [p for index, v in enumerate(value) for p in _non_finite_numbers(v, f"{key}[{index}]")]
    return []
