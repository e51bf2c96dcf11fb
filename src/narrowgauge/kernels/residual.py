"""The residual stream: the sum that runs through all layers.

    x_0 = embedding        x_i+1 = x_i + f_i(norm(x_i))

It is fp32 here, because it is a sum over all layers, and a narrow sum would lose exactly the small late
terms. `Residual` is the module in which a model adds to it; another one that keeps the sum in other numbers
may stand in its place. Where nothing else is asked for, the sum before a norm is part of the norm's own pass
(`norm.add_norm`), and the module is not called: what is added travels beside the stream, until a norm or
`total` adds it.
"""

import torch
from torch import Tensor, nn


def total(x: Tensor, delta: Tensor | None) -> Tensor:
    """The stream, with what travels beside it added."""
    return x if delta is None else x + delta


class Residual(nn.Module):
    """One point of the residual stream.

    Attributes:
        is_plain: Whether the sum is what torch makes of it, so that a norm may compute it.
        dtype: What the stream is in after this point; None for that of the sum.
    """

    is_plain = True
    dtype: torch.dtype | None = None

    def forward(self, x_BTD: Tensor, delta_BTD: Tensor | None = None) -> Tensor:
        """The stream after this point: `x_BTD`, or the sum of both."""
        return total(x_BTD, delta_BTD)
