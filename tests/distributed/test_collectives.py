"""What ranks agree on: largest magnitudes bit for bit whatever is not finite, numbers, objects, and tags."""

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist

from distributed.ranks import on_ranks
from narrowgauge.distributed.byte_counter import CommCounter
from narrowgauge.kernels.cast import amaxes_of
from narrowgauge.system.collectives import (
    all_reduce_flat,
    all_reduce_max,
    all_reduce_max_,
    all_reduce_values,
    broadcast_object,
    gather_objects,
    local_amax,
)

SHAPES = [(1, 1), (7, 5), (33, 129), (4096, 17), (0, 3)]
FILLS = [(), (math.nan,), (-math.nan, math.inf), (-math.inf,), (-3e4,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_local_amax_is_torchs_to_the_bit(dtype):
    """However a tensor lies, which stays as it is."""
    generator = torch.Generator().manual_seed(0)
    for shape, fill, scale in product(SHAPES, FILLS, (1.0, -0.0, torch.finfo(dtype).tiny / 8)):
        x = (torch.randn(shape, generator=generator) * scale).to(dtype)
        for i, value in enumerate(fill if x.numel() else ()):
            x.view(-1)[(i * x.numel()) // 2] = value
        for laid in (x, x.t(), x[..., ::2], x[None].expand(3, *shape)):
            before, amax = laid.clone(), local_amax(laid)
            assert torch.equal(laid.nan_to_num(), before.nan_to_num())
            assert (amax.dtype, amax.shape) == (dtype, ())
            assert not torch.signbit(amax) or amax.isnan()
            other = laid.abs().amax() if x.numel() else torch.zeros((), dtype=dtype)
            assert (amax.isnan() and other.isnan()) or torch.equal(amax, other), (shape, fill)


@pytest.mark.tier("thorough", keep=(3,))
@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks()
def test_amaxes_values_objects_and_sums_of_all_ranks():
    """Without a group nothing is replaced; the first rank of a group is not that of the world."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD

    def tensors_of(r):  # the second one is empty on odd ranks
        generator = torch.Generator().manual_seed(r)
        return [torch.randn(5, 3, generator=generator), torch.randn(0 if r % 2 else 4, generator=generator)]

    with CommCounter() as counter:
        each = all_reduce_max(amaxes_of(tensors_of(rank)), [group])
    of_all = [tensors_of(r) for r in range(world)]
    expected = [torch.cat([t[i].flatten() for t in of_all]).abs().amax() for i in range(2)]
    assert torch.equal(each, torch.stack(expected))
    poison = [math.nan, math.inf, -math.inf]
    bad = [torch.tensor([1.0, value if rank == world - 1 else 2.0]) for value in poison]
    assert all_reduce_max(amaxes_of(bad), [group]).tolist() == [math.inf] * 3
    alone = all_reduce_max(amaxes_of([torch.tensor([math.nan, 1]), torch.tensor([-math.inf])]), [])
    assert [str(x) for x in alone.tolist()] == ["nan", "inf"]
    flags = [torch.tensor(float(rank)), torch.tensor(-1.0 if rank else 0.0)]
    all_reduce_max_(flags, group)
    all_reduce_max_([], group)
    assert flags == [world - 1, 0]
    sums = [torch.tensor([[1.0, 2.0]]), torch.tensor([3.0]), torch.tensor(4.0)]
    with counter:
        all_reduce_flat(sums, group)
        all_reduce_flat([], group)
    assert [t.tolist() for t in sums] == [[[world, 2 * world]], [3 * world], 4 * world]
    assert counter.calls == {"amax": 1, "reduce": 1}
    sum_of_ranks = world * (world - 1) / 2
    assert all_reduce_values([rank, 1 / 3], [None], "cpu", torch.float64) == [sum_of_ranks, world / 3]
    assert all_reduce_values([2**53 + 1], [group], "cpu", torch.int64) == [world * 2**53 + world]
    assert gather_objects([rank] * rank, group) == [[r] * r for r in range(world)]
    assert broadcast_object({"from": rank}, group) == {"from": 0}
    first = max(world - 2, 0)
    some = dist.new_group(list(range(first, world)))
    assert rank < first or broadcast_object(f"from {rank}", some) == f"from {first}"
