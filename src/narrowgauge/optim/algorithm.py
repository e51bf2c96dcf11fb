"""An optimizer's algorithm, and how updated state is written.

An algorithm is a pure update in float32 and, optionally, a fused low-precision update.

The scale of a sharded tensor comes from its amax, and each process knows only the amax of its shard. One
tensor at a time would cost a round trip each, more than a hundred per step. So sharded parameters are updated
in batches of a few million elements: all in float32, then one all-reduce, then each is rounded. A parameter
that is not sharded is updated alone, which needs float32 memory for one only.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any

import torch

from narrowgauge.formats import RandomStream
from narrowgauge.quantization import QuantizedState, TensorShard, shard_of
from narrowgauge.quantization.sharding.shard import all_reduce_amaxes

TENSORS_A_BATCH = 2**22  # elements of a batch

NarrowParameter = tuple[torch.Tensor, Mapping[str, Any], int]  # a parameter, its group, its first stream
Write = tuple[QuantizedState, torch.Tensor, RandomStream | None]  # destination, values, random bits

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class UpdateBatch:
    """Float32 tensors of some parameters; local shards if processes share a parameter."""

    w: Tensors  # the weights, updated in place
    g: Tensors  # their gradients
    moments: Mapping[str, Tensors]  # the moments by place ("m", "v"), updated in place
    steps: Tensors  # the steps taken by each parameter, 0-dim float32; incremented in place
    #: The position of each local tensor in the full one; None for a full tensor
    shards: list[TensorShard | None]


#: `update(batch, options)`: `options` are the parameter group's.
Update = Callable[[UpdateBatch, Mapping[str, Any]], None]
#: `key_of(place)`: the key of the random bits that round the tensor of a place.
KeyOf = Callable[[str], tuple[int, int]]
#: `fused_update(parameter, state, options, step, key_of)`: updates a parameter and its state in place,
#: without float32 copies; returns False and changes nothing if it cannot.
FusedUpdate = Callable[[torch.Tensor, Mapping[str, Any], Mapping[str, Any], int, KeyOf], bool]


@dataclass(frozen=True)
class Algorithm:
    """The places of the moments, the update of weights, and the fused update if there is one."""

    moments: tuple[str, ...]
    update: Update
    fused_update: FusedUpdate | None = None

    def apply(self, batch: UpdateBatch, options: Mapping[str, Any]) -> None:
        """`update` on contiguous tensors: torch's fused kernels ignore strides, and moments have none."""
        w, g = ([x.contiguous() for x in tensors] for tensors in (batch.w, batch.g))
        self.update(replace(batch, w=w, g=g), options)
        for x, updated in zip(batch.w, w, strict=True):
            if updated is not x:
                x.copy_(updated)


def batches(narrow: Iterable[NarrowParameter]) -> Iterator[list[NarrowParameter]]:
    """Parameters that are updated together: each alone, unless it is sharded.

    Shards differ in size, but all processes must form the same batches, so the mean size counts.
    """
    batch: list[NarrowParameter] = []
    size = 0
    for item in narrow:
        shard = shard_of(item[0])
        elements = TENSORS_A_BATCH if shard is None else shard.shape.numel() // shard.shard_count
        if batch and size + elements > TENSORS_A_BATCH:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += elements
    if batch:
        yield batch


def write_all(updates: Iterable[Iterator[list[Write]]]) -> None:
    """Store updated tensors, in rounds; a collective for each computes the scales of all sharded ones."""
    for lists in zip_longest(*updates, fillvalue=()):
        writes = list(chain(*lists))
        sharing = [(to, x) for to, x, _ in writes if to.shares_scale]
        amaxes: Iterator[torch.Tensor] = iter(())
        if sharing:
            amaxes = iter(all_reduce_amaxes([x for _, x in sharing], [to.shard for to, _ in sharing]))
        for to, x, random in writes:
            to.write(x, random, amax=next(amaxes) if to.shares_scale else None)
