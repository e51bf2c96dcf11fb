"""The context of a piece of a tensor of attention: where it lies in the global tensor.

Tensors of attention are matrices, one for each head of each sequence: [Z, rows, columns] with Z = B N. Blocks
lie within such a matrix, so what a process or a piece does not hold changes no block, with one exception: a
scale of the full tensor needs the largest magnitude of all pieces, and of the heads that other processes
hold. It is found first, and then given to every piece. Random bits are those of an element's index in the
global tensor [B, all heads, rows, columns] of the step.
"""

from dataclasses import dataclass

import torch

from narrowgauge.formats import Randomness, RandomStream
from narrowgauge.quantization import Cast, QuantContext
from narrowgauge.quantization.blocks import Blocks, blocks_of
from narrowgauge.quantization.passes.rounding import block_amax
from narrowgauge.quantization.transforms import transformed


@dataclass(frozen=True, slots=True, eq=False)
class PieceContext(QuantContext):
    """The circumstances under which a piece [heads, rows, columns] is quantized.

    Attributes:
        largest: 0-dim float32, the largest magnitude of the global tensor; None if the piece is all of it.
        first: int64 [heads], the index in the global tensor of each head's first element in the piece.
        width: The columns of the global tensor.
    """

    largest: torch.Tensor | None = None
    first: torch.Tensor | None = None
    width: int = 0

    def global_amax(self, amax: torch.Tensor, cast: Cast, axis: int) -> torch.Tensor:
        """The largest magnitudes of blocks; that of the full tensor is known."""
        is_known = cast.block is None and self.largest is not None
        return self.largest.expand_as(amax) if is_known and self.largest is not None else amax

    def tensor_amax(self, amax: torch.Tensor) -> torch.Tensor:
        """The largest magnitude of the global tensor, 0-dim."""
        return amax.amax() if self.largest is None else self.largest

    def random_over(self, blocks: Blocks) -> Randomness:
        """The random numbers of a piece that is split into blocks."""
        if not isinstance(self.random, RandomStream):
            return self.random
        return blocks.split(self.random.uniform_at(self._indices(blocks)))

    def random_over_grid(self, blocks: Blocks, cast: Cast, axis: int) -> Randomness:
        """The random numbers of the scales of blocks: from a stream of their own, at their first element."""
        if not isinstance(self.random, RandomStream):
            return self.random
        numbers = blocks.split(self.random.of_scales().uniform_at(self._indices(blocks)))
        for dim in blocks.inner:
            numbers = numbers.narrow(dim, 0, 1)
        return numbers

    def _indices(self, blocks: Blocks) -> torch.Tensor:
        """The index of each element of the piece in the global tensor."""
        assert self.first is not None
        rows, columns = (torch.arange(n, device=self.first.device) for n in blocks.shape[-2:])
        return self.first[:, None, None] + rows[:, None] * self.width + columns


def needs_largest(cast: Cast | None) -> bool:
    """Whether a cast has a scale of the full tensor."""
    return cast is not None and cast.is_scaled and (cast.block is None or cast.scales.outer == "tensor")


def largest_of(x: torch.Tensor, cast: Cast, axis: int, context: QuantContext) -> torch.Tensor:
    """The largest magnitude that the scale of the full tensor is taken from, of one piece: 0-dim float32.

    Blocks with a scale of their own keep what is not finite to themselves.
    """
    x = transformed(x, cast, axis, context)
    blocks = blocks_of(x.shape, cast, axis)
    amax = block_amax(blocks.split(x), blocks)
    if cast.block is not None:
        amax = torch.where(amax.isfinite(), amax, 0.0)
    return amax.amax() if amax.numel() else amax.new_zeros(())
