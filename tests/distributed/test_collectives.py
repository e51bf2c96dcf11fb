"""What ranks agree on: largest magnitudes bit for bit whatever is not finite, numbers, objects, and tags."""

import math
from itertools import product

import pytest
import torch

from narrowgauge.collectives import comm_tag, current_comm_tag, local_amax

SHAPES = [(1,), (7, 5), (33, 129), (1000,), (4096, 17), (0,), (0, 3)]
FILLS = {
    "none": (),
    "nan": (math.nan,),
    "-nan and inf": (-math.nan, math.inf),
    "-inf": (-math.inf,),
    "largest": (-3e4,),
}


def laid_out(x, how):
    if how == "transposed":
        return x.t() if x.ndim == 2 else x
    return {"contiguous": x, "strided": x[..., ::2], "expanded": x[None].expand(3, *x.shape)}[how]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("how", ["contiguous", "transposed", "strided", "expanded"])
def test_the_local_amax_is_that_of_three_other_ways_to_the_bit(dtype, how):
    generator = torch.Generator().manual_seed(0)
    for shape, fill, scale in product(SHAPES, FILLS.values(), (1.0, 0.0, -0.0, torch.finfo(dtype).tiny / 8)):
        x = (torch.randn(shape, generator=generator) * scale).to(dtype)
        flat = x.view(-1)
        for i, value in enumerate(fill if x.numel() else ()):
            flat[(i * flat.numel()) // 2] = value
        x = laid_out(x, how)
        amax = local_amax(x)
        assert (amax.dtype, amax.shape) == (dtype, ())
        if not x.numel():
            assert amax == 0
            continue
        for other in (x.abs().amax(), torch.linalg.vector_norm(x, torch.inf), x.abs().max()):
            assert (amax.isnan() and other.isnan()) or torch.equal(amax, other), (shape, fill)
        assert not torch.signbit(amax) or amax.isnan()


def test_a_local_amax_leaves_its_tensor_as_it_is():
    x = torch.tensor([-3.0, 2.0])
    assert local_amax(x) == 3
    assert x.tolist() == [-3, 2]
    one = torch.tensor([-5.0])
    local_amax(one)
    assert one.item() == -5


@pytest.mark.tier("thorough", keep=(1, 3))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_amaxes_over_ranks_are_those_of_all_their_tensors(ranks, world):
    for found in ranks(world, "jobs_collectives.amaxes"):
        assert found["calls"] == {"amax": 1}
        assert found["each"] == found["expected"]
        assert found["infinite"] == [math.inf] * 3
        assert found["alone"] == ["nan", "inf"], "without a group nothing is replaced"


@pytest.mark.parametrize("world", [2, 3])
def test_values_and_objects_of_all_ranks(ranks, world):
    for found in ranks(world, "jobs_collectives.values_and_objects"):
        assert found["sums"] == [world * (world - 1) / 2, world / 3]
        assert found["integers"] == [world * 2**53 + world]
        assert found["largest"] == [world - 1, 0]
        assert found["gathered"] == [{"rank": rank, "list": [rank] * rank} for rank in range(world)]
        assert found["broadcast"] == {"from": 0}
        assert found["last"] == f"from {world - 2}", "rank 0 of the group, not of the world"


@pytest.mark.parametrize("world", [1, 2])
def test_sums_of_many_tensors_in_one_collective(ranks, world):
    for found in ranks(world, "jobs_collectives.flat_sums"):
        assert found["calls"] == {"reduce": 1}
        assert found["sums"] == [[[world, 2 * world]], [3 * world], 4 * world]


def test_tags_nest_and_end():
    assert current_comm_tag() == ""
    with comm_tag("reduce"):
        with comm_tag("amax"):
            assert current_comm_tag() == "amax"
        assert current_comm_tag() == "reduce"
    assert current_comm_tag() == ""
