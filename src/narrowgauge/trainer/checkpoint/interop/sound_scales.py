"""Scales that no quantizer makes: 0, negative, inverted or left out, which load without an error.

The bounds are those of trained networks: the largest value of a linear layer's weight lies between 2^-16 and
100. A scale that is wrong by less is only seen beside the run (`read_back.py`).
"""

from collections.abc import Callable

import torch

_SMALLEST, _LARGEST, _ZERO = 2.0**-16, 100.0, 2.0**-60


def require_sound(
    q: torch.Tensor, weight: torch.Tensor, lowest: float, inverted: Callable[[], float] | None
) -> None:
    """Check the scales of a weight, of which `lowest` is the lowest; a `ValueError` says what is wrong.

    `q` has the values of the codes, and `weight` the same times their scales. `inverted` returns the largest
    value with the reciprocal of the scale; it is None if the scale of the tensor is missing.
    """
    if lowest < 0:
        raise ValueError("a scale is negative")
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if largest < _ZERO and bool(q.any()):
        raise ValueError("all scales are 0")
    if largest <= _ZERO or _SMALLEST <= largest <= _LARGEST:
        return
    if inverted is None and largest > _LARGEST:
        raise ValueError(f"its values reach {largest:.2g}, and the scale of the tensor is missing")
    if inverted is not None and _SMALLEST <= (other := inverted()) <= _LARGEST:
        raise ValueError(
            f"its values reach {largest:.2g}, and {other:.2g} with the reciprocal of the scale, so that is "
            "what was stored"
        )
