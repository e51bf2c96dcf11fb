"""Outliers clamped before quantization, for FP4 (arXiv 2501.17116).

A few elements of an activation are much larger than the rest and cost all others their resolution. x is
clamped to its own quantiles 1 - a and a; the small part is quantized, and what was cut off, a sparse tensor,
is multiplied in high precision (`compensate`):

    x = clamp(x) + rest            x @ w  ~  Q(clamp(x)) @ Q(w) + rest @ Q(w)
"""

import torch

from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import DEFAULT_CONTEXT, QuantContext


def clamp_outliers(x: torch.Tensor, quantile: float, context: QuantContext = DEFAULT_CONTEXT) -> torch.Tensor:
    """Clamp a tensor to its quantiles 1 - `quantile` and `quantile`.

    Both are elements of the tensor, no mean of two. Those of a global tensor are found among all its
    elements, which are brought to every process that holds some.
    """
    if context.limits is not None:
        return x.clamp(*context.limits)
    elements = context.global_elements(x.detach())
    if not elements.numel():
        return x
    low, high = ranked(elements, *quantile_ranks(elements.numel(), quantile))
    return x.clamp(low, high)


def quantile_ranks(n: int, quantile: float) -> tuple[int, int]:
    """The ranks, from 0 in ascending order, of the quantiles 1 - `quantile` and `quantile` of n elements."""
    return int((1 - quantile) * n), min(int(quantile * n), n - 1)


def clamped(x: torch.Tensor, cast: Cast, context: QuantContext) -> torch.Tensor:
    """The tensor without its outliers, if the cast clamps them."""
    return clamp_outliers(x, cast.outliers, context) if cast.outliers else x


def ranked(x: torch.Tensor, *ranks: int) -> list[torch.Tensor]:
    """The elements of x of given ranks in ascending order (0 the smallest, NaN last): 0-dim, in x's dtype."""
    flat = x.flatten()
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.compiler.is_compiling():
        counts = torch.bincount(flat.view(torch.int16).int().bitwise_and_(0xFFFF), minlength=2**16)
        if not counts[0x7F81:0x8000].any() and not counts[0xFF81:].any():  # no NaN, which no order holds
            return [_from_counts(counts, rank) for rank in ranks]
    flat = flat.float()
    return [(flat.kthvalue(rank + 1).values + 0.0).to(x.dtype) for rank in ranks]  # -0 + 0 = +0


def _from_counts(counts: torch.Tensor, rank: int) -> torch.Tensor:
    """The bfloat16 of a rank, from how often each of the 65,536 bit patterns occurs.

    This is much faster than a selection among millions. Positive numbers are ordered as their bits are,
    negative ones the other way round.
    """
    negative, positive = counts[2**15 :].flip(0), counts[: 2**15]
    position = int(torch.searchsorted(torch.cat([negative, positive]).cumsum(0), rank, right=True))
    word = position - 2**15 if position >= 2**15 else -1 - position
    return torch.tensor(word, dtype=torch.int16).view(torch.bfloat16) + 0.0
