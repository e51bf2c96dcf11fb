"""Writes updated state in batches, so that processes find the scales of many tensors in one collective.

A tensor with one scale that several processes hold together is scaled by its largest magnitude, and each
process knows that of its own shard. One tensor at a time would cost a round trip for each, a hundred and more
a step. So such parameters are updated in batches of a few million elements: all in float32, then one
all-reduce, then each is rounded. A parameter that one process holds alone is updated alone, and takes memory
for one.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from narrowgauge.formats import RandomStream
from narrowgauge.quantization import QuantizedState, shard_of
from narrowgauge.quantization.sharding.amax import all_reduce_amaxes

TENSORS_A_BATCH = 2**22  # elements of a batch

NarrowParameter = tuple[torch.Tensor, Mapping[str, Any], int]  # a parameter, its group, its first stream
Write = tuple[QuantizedState, torch.Tensor, RandomStream | None]  # to write where, what, with which bits


def batches(narrow: Iterable[NarrowParameter]) -> Iterator[list[NarrowParameter]]:
    """Parameters that are updated together: each alone, unless several processes hold it.

    These have shards of different sizes and must make the same batches, so the mean size counts.
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


def write_all(writes: list[Write]) -> None:
    """Store updated tensors; one collective finds all scales that several processes share."""
    sharing = [(to, x) for to, x, _ in writes if to.shares_scale]
    amaxes = iter(all_reduce_amaxes([x for _, x in sharing], [to.shard for to, _ in sharing]))
    for to, x, random in writes:
        to.write(x, random, amax=next(amaxes) if to.shares_scale else None)


def is_random(state: QuantizedState) -> bool:
    """Whether a tensor is rounded with random bits when it is written."""
    return state.cast.is_random
