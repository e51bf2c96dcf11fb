"""State is written in batches, so that processes agree on the scales of many tensors in one collective.

A tensor with one scale that several processes hold together needs its largest magnitude, to which each of
them knows a part. Asking for one tensor at a time would cost a round trip for each, a hundred and more a
step. So parameters are updated in batches of a few million elements: all in float32, then one agreement,
then each is rounded. What nobody else holds is updated alone, and takes memory for one.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from narrowgauge.formats import RandomStream
from narrowgauge.optim.parameter import part_of
from narrowgauge.quantization import QuantizedState
from narrowgauge.quantization.sharding.amax import all_reduce_amaxes

TENSORS_A_BATCH = 2**22  # elements of a batch

Narrow = tuple[torch.Tensor, Mapping[str, Any], int]  # a parameter, its group, its first stream
Write = tuple[QuantizedState, torch.Tensor, RandomStream | None]


def batches(narrow: Iterable[Narrow]) -> Iterator[list[Narrow]]:
    """Parameters that are updated together: each alone, unless it is in several processes.

    These hold pieces of different sizes, and must make the same batches all the same.
    """
    batch: list[Narrow] = []
    size = 0
    for one in narrow:
        part = part_of(one[0])
        elements = TENSORS_A_BATCH if part is None else part.shape.numel() // part.shard_count
        if batch and size + elements > TENSORS_A_BATCH:
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += elements
    if batch:
        yield batch


def write_all(writes: list[Write]) -> None:
    """Store what was updated; scales that several processes share are agreed on together."""
    sharing = [(to, x) for to, x, _ in writes if to.shares_scale]
    found = iter(all_reduce_amaxes([x for _, x in sharing], [to.part for to, _ in sharing]))
    for to, x, random in writes:
        to.write(x, random, amax=next(found) if to.shares_scale else None)


def is_random(state: QuantizedState) -> bool:
    """Whether a tensor is rounded with random bits when it is written."""
    return state.cast.rounding == "stochastic"
