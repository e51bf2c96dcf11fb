"""What ranks agree on: largest magnitudes bit for bit whatever is not finite, numbers, objects, and tags."""

import math
from itertools import product

import pytest
import torch

from narrowgauge.system.collectives import comm_tag, current_comm_tag, local_amax

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
        before = x.clone()
        amax = local_amax(x)
        assert torch.equal(x.nan_to_num(), before.nan_to_num()), "it leaves its tensor as it is"
        assert (amax.dtype, amax.shape) == (dtype, ())
        if not x.numel():
            assert amax == 0
            continue
        for other in (x.abs().amax(), torch.linalg.vector_norm(x, torch.inf), x.abs().max()):
            assert (amax.isnan() and other.isnan()) or torch.equal(amax, other), (shape, fill)
        assert not torch.signbit(amax) or amax.isnan()


@pytest.mark.tier("thorough", keep=(3,))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_amaxes_values_objects_and_sums_of_all_ranks(ranks, world):
    """Without a group nothing is replaced; the first rank of a group is not that of the world."""
    first = max(world - 2, 0)
    for found in ranks(world, "jobs_comm.collectives"):
        assert found == {
            "calls": {"amax": 1, "reduce": 1},
            "amaxes are those of all": True,
            "not finite": [math.inf] * 3,
            "alone": ["nan", "inf"],
            "sums": [world * (world - 1) / 2, world / 3],
            "integers": [world * 2**53 + world],
            "largest": [world - 1, 0],
            "gathered": [{"rank": rank, "list": [rank] * rank} for rank in range(world)],
            "broadcast": {"from": 0},
            "last": f"from {first}",
            "flat": [[[world, 2 * world]], [3 * world], 4 * world],
        }


def test_torchs_own_collectives_are_counted(ranks):
    for sent, calls in ranks(3, "jobs_comm.counted"):
        n = 4 * 12 * 3
        assert sent == {"gather": 2 * n, "reduce": 2 * n / 3, "other": 4 * n / 3}
        assert calls == {"gather": 1, "reduce": 1, "other": 1}


def test_tags_nest_and_end():
    assert current_comm_tag() == ""
    with comm_tag("reduce"):
        with comm_tag("amax"):
            assert current_comm_tag() == "amax"
        assert current_comm_tag() == "reduce"
    assert current_comm_tag() == ""
