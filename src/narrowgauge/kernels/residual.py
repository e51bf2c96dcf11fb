"""The residual stream: the sum that runs through all layers.

    x_0 = embedding        x_i+1 = x_i + f_i(norm(x_i))

It is fp32, because it is a sum over all layers, and a low-precision sum would lose exactly the small late
terms. `Residual` is the module in which a model adds to the stream; it can be replaced by one that stores the
sum in another format. Where the sum is torch's, it is computed in the pass of the next norm (`norm.add_norm`)
and the module is not called: the addend is passed along with the stream until a norm or `total` adds it.
"""

import torch
from torch import Tensor, nn


def total(x: Tensor, delta: Tensor | None) -> Tensor:
    """The stream with its pending addend added."""
    return x if delta is None else x + delta


class Residual(nn.Module):
    """One point of the residual stream."""

    dtype: torch.dtype | None = None  # the dtype of the stream after this point; None for that of the sum

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Whether the sum with an addend of this dtype is torch's, so that a norm may compute it."""
        return True

    def pending(self, x_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """The stream after this point, as a norm accepts it: with an addend or, already summed, None."""
        if self.is_plain(delta_BTD.dtype):
            return x_BTD, delta_BTD
        return self(x_BTD, delta_BTD), None

    def forward(self, x_BTD: Tensor, delta_BTD: Tensor | None = None) -> Tensor:
        """The stream after this point: `x_BTD`, or the sum of both."""
        return total(x_BTD, delta_BTD)
