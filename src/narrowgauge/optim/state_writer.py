"""Writes updated state in batches, so that processes compute the scales of many tensors in one collective.

The scale of a sharded tensor comes from its amax, and each process knows only the amax of its shard. One
tensor at a time would cost a round trip each, more than a hundred per step. So sharded parameters are updated
in batches of a few million elements: all in float32, then one all-reduce, then each is rounded. A parameter
that is not sharded is updated alone, which needs float32 memory for one only.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, zip_longest
from typing import Any

import torch

from narrowgauge.formats import RandomStream
from narrowgauge.quantization import QuantizedState, shard_of
from narrowgauge.quantization.sharding.shard import all_reduce_amaxes

TENSORS_A_BATCH = 2**22  # elements of a batch

NarrowParameter = tuple[torch.Tensor, Mapping[str, Any], int]  # a parameter, its group, its first stream
Write = tuple[QuantizedState, torch.Tensor, RandomStream | None]  # destination, values, random bits


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
        amaxes = iter(all_reduce_amaxes([x for _, x in sharing], [to.shard for to, _ in sharing]))
        for to, x, random in writes:
            to.write(x, random, amax=next(amaxes) if to.shares_scale else None)
