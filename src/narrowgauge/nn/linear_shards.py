"""What of a linear layer lies here, when several processes compute it together.

    tokens     some tokens of every sequence (sequence and context parallel)
    inputs     some columns of the weight: products are sums that lack the others' (row-wise tensor parallel)
    outputs    some rows of the weight (column-wise tensor parallel)

A layer needs this to lay blocks, scales and random bits on the global tensors. How tokens and sums travel is
given to it as two functions, which belong to the room `distributed`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from narrowgauge.quantization import ShardAxis, TensorShard, full_axis

Exchange = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TokenShard:
    """Of each sequence's tokens those of one share of `count` equal ones, the groups holding the others."""

    index: int
    count: int
    groups: tuple[dist.ProcessGroup, ...]

    def axis(self, samples: int, here: int) -> ShardAxis:
        """Of so many sequences one after the other, `here` tokens of each."""
        each = here * self.count
        segments = tuple((b * each + self.index * here, here) for b in range(samples))
        return ShardAxis(samples * each, segments, self.groups)


@dataclass(frozen=True)
class LinearShards:
    """The division of one layer; None for what lies here whole.

    `before` makes of the input that of the products, `after` of their result the layer's, before a bias.
    """

    tokens: TokenShard | None = None
    inputs: ShardAxis | None = None
    outputs: ShardAxis | None = None
    before: Exchange | None = None
    after: Exchange | None = None

    def tensor_shards(self, samples: int, m: int, n: int, k: int) -> dict[str, TensorShard]:
        """The parts of x (M, K), w (N, K) and dy (M, N), M tokens of `samples` sequences being here."""
        M = full_axis(m) if self.tokens is None else self.tokens.axis(samples, m // samples)
        N, K = self.outputs or full_axis(n), self.inputs or full_axis(k)
        every = {"x": TensorShard((M, K)), "w": TensorShard((N, K)), "dy": TensorShard((M, N))}
        return {name: part for name, part in every.items() if not part.is_full}
