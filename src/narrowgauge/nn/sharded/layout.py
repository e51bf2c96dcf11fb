"""The shards of a linear layer that several processes compute together.

    tokens     some tokens of every sequence (sequence and context parallel)
    inputs     some columns of the weight: products are partial sums (row-wise tensor parallel)
    outputs    some rows of the weight (column-wise tensor parallel)

A layer needs this to lay blocks, scales and random bits on the global tensors. Two functions of the room
`distributed` exchange tokens and sums.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from narrowgauge.quantization import ShardAxis, TensorShard, full_axis

Exchange = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TokenShard:
    """Share `index` of `count` equal shares of each sequence's tokens; `groups` together hold all of them."""

    index: int
    count: int
    groups: tuple[dist.ProcessGroup, ...]

    def axis(self, samples: int, local: int) -> ShardAxis:
        """The axis of `samples` sequences one after the other, with `local` local tokens of each."""
        length = local * self.count
        segments = tuple((b * length + self.index * local, local) for b in range(samples))
        return ShardAxis(samples * length, segments, self.groups)


@dataclass(frozen=True)
class LinearShards:
    """The division of one layer; None for what is not divided.

    `before` turns the layer's input into that of the products, `after` turns their result into the layer's,
    without the bias.
    """

    tokens: TokenShard | None = None
    inputs: ShardAxis | None = None
    outputs: ShardAxis | None = None
    before: Exchange | None = None
    after: Exchange | None = None

    def tensor_shards(self, samples: int, m: int, n: int, k: int) -> dict[str, TensorShard]:
        """The shards of x (M, K), w (N, K) and dy (M, N), for M local tokens of `samples` sequences."""
        M = full_axis(m) if self.tokens is None else self.tokens.axis(samples, m // samples)
        N, K = self.outputs or full_axis(n), self.inputs or full_axis(k)
        shards = {"x": TensorShard((M, K)), "w": TensorShard((N, K)), "dy": TensorShard((M, N))}
        return {name: shard for name, shard in shards.items() if not shard.is_full}
