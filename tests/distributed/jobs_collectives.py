"""What ranks do in the tests of collectives."""

import math

import torch
import torch.distributed as dist

from narrowgauge.collectives import (
    all_reduce_flat,
    all_reduce_max,
    all_reduce_max_,
    all_reduce_values,
    broadcast_object,
    gather_objects,
)
from narrowgauge.distributed.comm.byte_counter import CommCounter
from narrowgauge.kernels.cast import amaxes_of


def tensors_of(rank):
    """Two tensors of a rank, the second one empty on odd ranks."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(5, 3, generator=generator), torch.randn(0 if rank % 2 else 4, generator=generator)]


def amaxes():
    rank, world = dist.get_rank(), dist.get_world_size()
    with CommCounter() as counter:
        each = all_reduce_max(amaxes_of(tensors_of(rank)), [dist.group.WORLD])
    everyone = [tensors_of(r) for r in range(world)]
    expected = [torch.cat([t[i].flatten() for t in everyone]).abs().amax() for i in range(2)]
    poison = [math.nan, math.inf, -math.inf]
    bad = [torch.tensor([1.0, value if rank == world - 1 else 2.0]) for value in poison]
    alone = all_reduce_max(amaxes_of([torch.tensor([math.nan, 1]), torch.tensor([-math.inf])]), [])
    return {
        "calls": dict(counter.calls),
        "each": each.tolist(),
        "expected": torch.stack(expected).tolist(),
        "infinite": all_reduce_max(amaxes_of(bad), [dist.group.WORLD]).tolist(),
        "alone": [str(x) for x in alone.tolist()],
    }


def values_and_objects():
    rank, world = dist.get_rank(), dist.get_world_size()
    some = dist.new_group(list(range(world - 2, world)))
    flags = [torch.tensor(float(rank)), torch.tensor(-1.0 if rank else 0.0)]
    all_reduce_max_(flags, dist.group.WORLD)
    all_reduce_max_([], dist.group.WORLD)
    return {
        "sums": all_reduce_values([rank, 1 / 3], [None], "cpu", torch.float64),
        "integers": all_reduce_values([2**53 + 1], [dist.group.WORLD], "cpu", torch.int64),
        "largest": [flag.item() for flag in flags],
        "gathered": gather_objects({"rank": rank, "list": [rank] * rank}, dist.group.WORLD),
        "broadcast": broadcast_object({"from": rank}, dist.group.WORLD),
        "last": broadcast_object(f"from {rank}", some) if rank >= world - 2 else f"from {world - 2}",
    }


def flat_sums():
    tensors = [torch.tensor([[1.0, 2.0]]), torch.tensor([3.0]), torch.tensor(4.0)]
    with CommCounter() as counter:
        all_reduce_flat(tensors, dist.group.WORLD)
        all_reduce_flat([], dist.group.WORLD)
    return {"calls": dict(counter.calls), "sums": [t.tolist() for t in tensors]}
