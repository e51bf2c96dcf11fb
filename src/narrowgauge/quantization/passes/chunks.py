"""Split tensors, walked through in chunks.

On a CPU a chunk stays in the cache, because an elementwise operation on newly allocated memory costs several
times its arithmetic. On a GPU chunks are large and only bound the memory of temporaries. A chunk gets exactly
the numbers that the full tensor would get; compiled code takes the tensor in one chunk.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from narrowgauge.formats.rounding import CHUNK

LARGE_CHUNK = 2**25  # elements whose temporaries a GPU has room for


class Chunk(NamedTuple):
    """Some of a split tensor: a range of positions along one dimension."""

    dim: int
    start: int
    size: int

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """The chunk of a tensor with the same dimensions; one of size 1 is the same for all chunks."""
        return t if not t.ndim or t.shape[self.dim] == 1 else t.narrow(self.dim, self.start, self.size)

    def first_element(self, split: torch.Tensor) -> int:
        """The index of the chunk's first element in the tensor."""
        return self.start * (split.numel() // split.shape[self.dim])


def chunks(split: torch.Tensor, in_one: bool = False) -> Iterator[Chunk]:
    """The chunks of a split tensor, in the order of its elements."""
    dim = 1 if split.ndim > 1 and split.shape[0] == 1 else 0
    elements = CHUNK if split.device.type == "cpu" else LARGE_CHUNK
    if split.is_meta:  # only the amount of memory matters
        elements = max(elements, split.numel() // 64)
    if in_one or torch.compiler.is_compiling() or split.numel() <= elements:
        yield Chunk(dim if split.ndim else 0, 0, split.shape[dim] if split.ndim else 1)
        return
    length = split.shape[dim]
    size = max(1, elements * length // split.numel())
    for start in range(0, length, size):
        yield Chunk(dim, start, min(size, length - start))
