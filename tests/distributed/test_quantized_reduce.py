"""Gradients on the wire: every number against an oracle that gathers all and loops, every byte counted."""

import math

import pytest
import torch

from narrowgauge.distributed.comm.ring_reduce import ring_sum
from narrowgauge.formats import decode, encode, round_to
from narrowgauge.formats import format as format_named

POWERS = {"cast": "e4m3", "power_of_two": True}
LEARNING = {**POWERS, "prescale": True}


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_every_pair_of_codes_adds_up_like_numbers(name):
    element = format_named(name)
    codes = torch.arange(256, dtype=torch.uint8)
    a, b = codes.repeat_interleave(256), codes.repeat(256)
    sums, cut = ring_sum(torch.stack([a, b]), 1, element, counts=True)  # rank 1 begins with rank 0's
    exact = decode(a, element).double() + decode(b, element).double()
    beyond = exact.float().abs() > element.max
    finite = exact.isfinite()
    expected = round_to(exact, element)
    assert torch.equal(decode(sums, element)[finite].double(), expected[finite])
    assert torch.equal(cut.bool()[finite], beyond[finite])
    assert decode(sums, element)[exact.isnan()].isnan().all()


def test_the_order_is_the_rings():
    """1 + 1/16 is a tie of E4M3 and rounds down to even; 1/16 + 1/16 added before it is not lost."""
    element = format_named("e4m3")
    parts = encode(torch.tensor([[1.0], [1 / 16], [1 / 16]]), element)
    found = [float(decode(ring_sum(parts, rank, element)[0], element)) for rank in range(3)]
    assert found == [1.125, 1.0, 1.0]  # begun by rank 1, 2, 0


def test_fp16_overflows_to_infinity_and_codes_saturate():
    parts = torch.tensor([[60000.0], [60000.0]], dtype=torch.float16)
    assert ring_sum(parts, 0, format_named("fp16"))[0].isinf()
    parts = encode(torch.tensor([[-400.0], [-400.0]]), format_named("e4m3"))
    assert decode(ring_sum(parts, 0, format_named("e4m3"))[0], format_named("e4m3")) == -448


@pytest.mark.tier("thorough", keep=(3,))
@pytest.mark.parametrize("world", [2, 3])
def test_a_scattered_bucket(ranks, world):
    casts = ["e4m3", "fp32", "e5m2", "bf16", POWERS, "fp16", "fp32"]
    for found in ranks(world, "jobs_comm.scattered", casts=casts):
        size = {"fp32": 4, "bf16": 2, "fp16": 2}
        # one byte an element of each e4m3 and e5m2, to each of the others
        each = sum(size.get(str(c), 1) * w for c, w in zip(casts, found["widths"], strict=True))
        assert found["sent"]["reduce"] == (world - 1) * each
        assert found["calls"] == {"amax": 1, "reduce": 2}


@pytest.mark.parametrize(("cast", "poison"), [("e4m3", math.inf), ("e5m2", math.nan)])
def test_what_is_not_finite_anywhere_is_nan_everywhere(ranks, cast, poison):
    ranks(2, "jobs_comm.scattered", casts=[cast], poison=poison)


@pytest.mark.tier("thorough", keep=(3,))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_list_reduced_everywhere(ranks, world):
    ranks(world, "jobs_comm.reduced_everywhere", casts=["e4m3", "bf16", "fp32"])


def test_bytes_of_an_all_reduce(ranks):
    (found, _) = ranks(2, "jobs_comm.reduced_everywhere", casts=["e4m3", "e4m3"])
    # 15 and 11 elements, padded to 16 and 12: half of them there, half of the sums back
    assert found["sent"] == {"amax": 8, "reduce": (16 + 12) / 2 + (16 + 12) / 2}
    assert found["calls"] == {"amax": 1, "reduce": 2}


def test_the_factor_learns_how_many_ranks_there_are(ranks):
    two, three = ranks(2, "jobs_comm.learned", steps=3), ranks(3, "jobs_comm.learned", steps=4)
    assert all(history == two[0] for history in two)
    assert all(history == three[0] for history in three)
    assert [mu for mu, _, _ in two[0]] == [1, 0.5, 0.5]
    assert [total for _, _, total in two[0]] == [448, 896, 896]  # cut once, then there is room
    assert [total for _, _, total in three[0]] == [448, 896, 1280, 1280]  # 1344 lies between 1280 and 1408
    assert [share > 0 for _, share, _ in three[0]] == [True, True, False, False]


FSDP = [
    (2, "e4m3", {"averages": True}),
    (3, LEARNING, {"width": 13}),
    (3, "e4m3", {"width": 13}),
    (2, "bf16", {}),
]


@pytest.mark.tier("thorough", keep=1)
@pytest.mark.parametrize(("world", "reduce", "how"), FSDP, ids=str)
def test_fsdp(ranks, world, reduce, how):
    """Sums, and the averages that FSDP2 takes in a custom loop."""
    every = ranks(world, "jobs_comm.sharded", reduce=reduce, **how)
    width = how.get("width", 24)
    rows = [-(-width // world) * 16, -(-16 // world) * width]  # of a shard: up and down
    wide = [-(-16 // world)] * 3 + [-(-width // world)]  # norm, gain and bias
    size = 2 if reduce == "bf16" else 1
    assert every[0]["sent"]["reduce"] == 2 * (world - 1) * (size * sum(rows) + 4 * sum(wide))


@pytest.mark.tier("thorough", keep=("e4m3",))
@pytest.mark.parametrize("reduce", ["e4m3", "bf16", "fp32"])
def test_ddp(ranks, reduce):
    ranks(2, "jobs_comm.replicated", reduce=reduce)


@pytest.mark.tier("thorough", keep=2)
@pytest.mark.parametrize(
    ("grad", "reduce"), [(LEARNING, LEARNING), ("bf16", "e4m3"), ("bf16", "bf16"), ("fp32", "e4m3")]
)
def test_gradients_at_rest(ranks, grad, reduce):
    for found in ranks(3, "jobs_comm.at_rest", grad=grad, reduce=reduce):
        padded = [n + -n % 3 for n in found["elements"]]
        size = 2 if reduce == "bf16" else 1
        assert found["sent"]["reduce"] == 2 * 2 * size * sum(padded) // 3


def test_a_weight_in_pieces_has_one_scale(ranks):
    every = ranks(4, "jobs_comm.in_pieces")
    assert all(factor == every[0] for factor in every)


def test_factors_are_the_same_on_copies_of_shards(ranks):
    every = ranks(4, "jobs_comm.copied")
    assert all(factors == every[0] for factors in every)
    assert all(overflowed > 0 for _, overflowed in every[0])


def test_a_parameter_without_a_gradient_is_named(ranks):
    for sentence in ranks(2, "jobs_comm.left_out"):
        assert "some parameter of the module took no part in the loss; freeze it" in sentence
