"""The shard of a linear layer that this process computes, where several compute it together.

    tokens     some tokens of every sequence (sequence and context parallel)
    inputs     some columns of the weight: matmuls give partial sums (row-wise tensor parallel)
    outputs    some rows of the weight (column-wise tensor parallel)

A layer needs this to lay out blocks, scales and random bits on the global tensors. Two functions exchange
tokens and sums with the other processes; they are in the room `distributed`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from narrowgauge.quantization import ShardAxis, TensorShard, full_axis

Exchange = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class EqualShare:
    """One of `count` equal shares of what processes hold: of each sequence's tokens, or of all heads."""

    index: int = 0
    count: int = 1
    groups: tuple[dist.ProcessGroup, ...] = ()  # the process groups that hold the other shares

    def axis(self, samples: int, local: int) -> ShardAxis:
        """The axis of the tokens of `samples` concatenated sequences; `local` of each are on this rank."""
        length = local * self.count
        segments = tuple((b * length + self.index * local, local) for b in range(samples))
        return ShardAxis(samples * length, segments, self.groups)


@dataclass(frozen=True)
class LinearShards:
    """The sharding of one layer; None for a dimension that is not sharded.

    An expert computes tokens of the sequences of `pool` processes. Their n-th micro-batches are concatenated
    into one, so that its random bits are those of one process with `pool` times as many sequences in each.
    """

    tokens: EqualShare | None = None  # the shard of the tokens
    inputs: ShardAxis | None = None  # the shard of the weight's columns
    outputs: ShardAxis | None = None  # the shard of the weight's rows
    before: Exchange | None = None  # computes the input of the matmuls from the layer's input
    after: Exchange | None = None  # computes the layer's output, still without bias, from the matmul's result
    pool: int = 1  # the processes of whose sequences the layer computes tokens
    #: The first of their sequences in a pass, less `pool` times the first of this process's
    pool_offset: int = 0
    is_whole: bool = field(init=False, compare=False)  # whether this process computes the layer alone

    def __post_init__(self) -> None:
        parts = (self.tokens, self.inputs, self.outputs, self.before, self.after)
        # Not computed at first use, which compiled code would take for a change of the layer.
        object.__setattr__(self, "is_whole", self.pool == 1 and all(part is None for part in parts))

    def tensor_shards(self, samples: int, m: int, n: int, k: int) -> dict[str, TensorShard]:
        """The shards of x (M, K), w (N, K) and dy (M, N), M tokens of `samples` sequences; full ones are left
        out."""
        if self.tokens is None and self.inputs is None and self.outputs is None:
            return {}
        M = full_axis(m) if self.tokens is None else self.tokens.axis(samples, m // samples)
        N, K = self.outputs or full_axis(n), self.inputs or full_axis(k)
        shards = {"x": TensorShard((M, K)), "w": TensorShard((N, K)), "dy": TensorShard((M, N))}
        return {name: shard for name, shard in shards.items() if not shard.is_full}
