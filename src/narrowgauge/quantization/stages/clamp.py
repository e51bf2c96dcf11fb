"""The clamp of outliers: the few elements of an activation much larger than the rest (FP4, arXiv 2501.17116).

They cost all other elements resolution. x is clamped to its own quantiles 1 - a and a; the clamped part is
quantized, and the remainder, a sparse tensor, is multiplied in high precision (`compensate`):

    x = clamp(x) + rest            x @ w  ~  Q(clamp(x)) @ Q(w) + rest @ Q(w)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def quantile_ranks(n: int, quantile: float) -> tuple[int, int]:
    """The ranks, from 0 in ascending order, of the quantiles 1 - `quantile` and `quantile` of n elements."""
    return int((1 - quantile) * n), min(int(quantile * n), n - 1)


def ranked(x: torch.Tensor, *ranks: int) -> list[torch.Tensor]:
    """The elements of x at given ranks in ascending order (0 the smallest, NaN last): 0-dim, in x's dtype."""
    import torch

    from narrowgauge.torch_compat import not_strict

    flat = x.flatten()
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.compiler.is_compiling():
        counts = torch.bincount(flat.view(torch.int16).int().bitwise_and_(0xFFFF), minlength=2**16)
        if not counts[0x7F81:0x8000].any() and not counts[0xFF81:].any():  # no NaN, which no order holds
            return [_from_counts(counts, rank) for rank in ranks]
    flat = flat.float()
    with not_strict():  # the indices differ between runs, the values do not
        values = [flat.kthvalue(rank + 1).values for rank in ranks]
    return [(value + 0.0).to(x.dtype) for value in values]  # -0 + 0 = +0


def _from_counts(counts: torch.Tensor, rank: int) -> torch.Tensor:
    """The bfloat16 of a given rank, from a histogram of all 65,536 bit patterns.

    Much faster than selecting among millions of elements. Positive values are ordered as their bits, negative
    ones in reverse.
    """
    import torch

    negative, positive = counts[2**15 :].flip(0), counts[: 2**15]
    position = int(torch.searchsorted(torch.cat([negative, positive]).cumsum(0), rank, right=True))
    word = position - 2**15 if position >= 2**15 else -1 - position
    return torch.tensor(word, dtype=torch.int16, device="cpu").view(torch.bfloat16) + 0.0
