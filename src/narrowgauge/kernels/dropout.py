"""Dropout whose bits are a function of (seed, step, layer, element), whereas torch's come from a generator.

    y = x / (1 - p) where it is kept, else 0               kept with probability 1 - p, so that E[y] = x
    dx = dy / (1 - p) where it is kept, else 0

(Srivastava et al., JMLR 15, 2014.) An element is kept if the upper 24 of its 32 random bits
(`formats.counter_rng`) are at least round(2^24 p). Bits are laid out on the global tensor of the step, all
sequences of all processes: sequence by sequence, then its tokens (or its heads), then the rest. So a mask is
the same after a resume, in a recomputed block, for any micro-batch size, and on any number of devices: a
process only computes the bits of its elements.

The mask takes one byte per element, which the backward pass needs. There is no dedicated kernel: the bits are
some twenty integer operations, which a GPU's compiler fuses with the rest under `training.compile`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from narrowgauge.formats import RANDOM_BITS, RandomStream, stream_key
from narrowgauge.system.errors import UserError


class Dropout(nn.Module):
    """Dropout in training: active where a module is in training mode and gradients are recorded.

    Attributes:
        p: The probability with which an element becomes 0.
        tensor: The tensor id of the random stream.
        is_positioned: Whether the step was ever set.
        key: int32 [2], the key of the step's stream.
        first_sample: int64, 0-dim: the index in the global batch of the first sequence of this pass.
    """

    def __init__(self, p: float, tensor: int) -> None:
        super().__init__()
        self.p, self.tensor, self.is_positioned = p, tensor, False
        # Tensors, so that code is not recompiled every step; not buffers, which data parallelism would
        # overwrite with its first process's.
        self.key = torch.zeros(2, dtype=torch.int32, device="cpu")
        self.first_sample = torch.zeros((), dtype=torch.int64, device="cpu")

    def set_position(self, seed: int, step: int, first_sample: int, device: torch.device) -> None:
        """Set the step, and the sequence at which the next pass begins."""
        self.key = torch.tensor(stream_key(seed, step, self.tensor), dtype=torch.int32, device=device)
        self.first_sample = torch.tensor(first_sample, device=device)
        self.is_positioned = True

    def forward(self, x: Tensor, index: int = 0, count: int = 1) -> Tensor:
        """Drop elements of x [B, S, ...], this rank's share of [B, count S, ...].

        Args:
            x: Some sequences; the shares are along the second axis.
            index: The index of the local share.
            count: The number of equal shares.

        Returns:
            The same shape and dtype.
        """
        if not (self.training and torch.is_grad_enabled()):
            return x
        if not self.is_positioned and not x.is_meta:
            raise UserError(
                "dropout draws its bits from the step, and this loop does not set the step; call "
                "narrowgauge.set_step before each forward pass, or set model.dropout and "
                "model.attention_dropout to 0"
            )
        kept = self._bits(x.shape, index, count) >= round(self.p * 2**RANDOM_BITS)
        return torch.where(kept, x * (1 / (1 - self.p)), 0.0)

    def _bits(self, shape: Sequence[int], index: int, count: int) -> Tensor:
        """24 random bits for each element."""
        B, *rest = shape
        elements = torch.Size(rest).numel()  # local ones, per sequence
        first = self.first_sample * (elements * count) + elements * index
        stream = RandomStream(self.key, first)
        if count == 1:
            bits = stream.bits((B, *rest))
        else:
            starts = range(0, B * elements * count, elements * count)
            bits = torch.stack([stream.from_element(start).bits(tuple(rest)) for start in starts])
        return (bits >> (32 - RANDOM_BITS)) & (2**RANDOM_BITS - 1)

    def extra_repr(self) -> str:
        """The probability."""
        return f"p={self.p}"
