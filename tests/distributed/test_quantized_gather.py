"""Weights on the wire: cut by FSDP and gathered in low precision, a model computes as if it were whole."""

import math

import pytest
import torch

from narrowgauge.nn.gemm import quantized_operand
from narrowgauge.nn.weight import GatheredWeight
from narrowgauge.quantization import cast, emulate, quantize

D = 16
SIZES = {
    "fp8": 1,
    "fp8-fnuz": 1,
    "bf16": 2,
    "fp16": 2,
    "bf16-sr": 2,
    "msamp-o1": 2,
    "msamp-o3": 1,
    "mxfp8": 4,
}
WIDE = {"reduce": "fp32"}  # sums are compared with one process's


def bytes_of_a_gather(world, width, size):
    """What a rank sends of one block: rows are dealt out evenly, the last ranks' filled up."""
    weights = [-(-width // world) * D, -(-D // world) * width]
    others = 2 * -(-D // world) + -(-width // world)  # norm and bias
    return (world - 1) * (size * sum(weights) + 4 * others)


@pytest.mark.tier("thorough", keep=("fp8",))
@pytest.mark.parametrize("recipe", SIZES)
def test_two_ranks_compute_as_one(ranks, recipe):
    for found in ranks(2, "jobs_gather.like_the_whole", recipe=recipe, places=WIDE):
        for sent, calls in zip(found["sent"], found["calls"], strict=True):
            # two blocks, each gathered forward and backward
            assert sent["gather"] == 4 * bytes_of_a_gather(2, 24, SIZES[recipe])
            assert calls["gather"] == 4


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", ["fp8", "bf16-sr", "msamp-o2", "msamp-o3"])
def test_three_ranks_with_rows_that_do_not_divide(ranks, recipe):
    size = {"fp8": 1, "msamp-o3": 1}.get(recipe, 2)
    for found in ranks(3, "jobs_gather.like_the_whole", recipe=recipe, places=WIDE, width=13):
        assert found["sent"][0]["gather"] == 4 * bytes_of_a_gather(3, 13, size)


@pytest.mark.tier("thorough")  # three ranks above
def test_more_ranks_than_rows_fill_up(ranks):
    """13 rows over 4 ranks: the last has one; 2 rows over 3: the last has none."""
    ranks(4, "jobs_gather.like_the_whole", recipe="fp8", width=13)
    ranks(3, "jobs_gather.like_the_whole", recipe="msamp-o3", places=WIDE, width=2)


@pytest.mark.parametrize(("recipe", "kept"), [("fp8", []), ("msamp-o3", ["grad", "master", "weight"])])
def test_the_record_of_a_weight_is_its_shards(ranks, recipe, kept):
    for found in ranks(2, "jobs_gather.records", recipe=recipe):
        assert found == {"layers": 4, "kept": kept, "gathered": 0}


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", ["fp8", "msamp-o3"])
def test_copies_of_shards(ranks, recipe):
    ranks(4, "jobs_gather.like_the_whole", recipe=recipe, places=WIDE, copies=2)


@pytest.mark.tier("thorough", keep=("msamp-o2",))
@pytest.mark.parametrize("recipe", ["fp8", "msamp-o2"])
def test_weights_stored_the_other_way_round(ranks, recipe):
    ranks(2, "jobs_gather.like_the_whole", recipe=recipe, places=WIDE, transposed=True)


@pytest.mark.tier("thorough", keep=("fp8",))
@pytest.mark.parametrize("recipe", ["fp8", "msamp-o1"])
def test_whole_weights_kept_from_forward_to_backward(ranks, recipe):
    (found, _) = ranks(2, "jobs_gather.like_the_whole", recipe=recipe, places=WIDE, reshard=False)
    assert [calls["gather"] for calls in found["calls"]] == [2, 2]


@pytest.mark.tier("thorough", keep=("fp8-places1",))
@pytest.mark.parametrize(
    ("recipe", "places"),
    [
        ("msamp-o3", {**WIDE, "gather": "fp32"}),
        ("fp8", {"gather": "fp32"}),
        ("fp8", {"grad": "e4m3"}),
        ("coat", {"grad": {"cast": "bf16", "rounding": "stochastic"}}),
    ],
)
def test_other_places(ranks, recipe, places):
    ranks(2, "jobs_gather.like_the_whole", recipe=recipe, places=places)


def test_scales_are_agreed_on_once_for_all_layers(ranks):
    (found, _) = ranks(2, "jobs_gather.like_the_whole", recipe="fp8")
    assert found["renewed"] == [{"amax": 4 * 4}, {"amax": 1}]  # four weights
    assert found["calls"][0]["amax"] == 4  # each alone, since no step has done it before
    assert "amax" not in found["calls"][1]


@pytest.mark.tier("thorough", keep=("fp8", "msamp-o2"))
@pytest.mark.parametrize(
    ("recipe", "numbers"), [("fp8", "uint8"), ("bf16", "bfloat16"), ("msamp-o2", "float16")]
)
def test_a_weight_is_given_back_after_its_forward_pass(ranks, recipe, numbers):
    for found in ranks(2, "jobs_gather.what_is_computed_with", recipe=recipe):
        assert found["gathered"]
        assert found["looks"] == "torch.float32"
        assert found["numbers"] == f"torch.{numbers}"
        assert found["kept"] == 0
        assert found["shown"].startswith("GatheredWeight((24, 16)")


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", ["bf16-sr", "msamp-o2"])
def test_gradients_at_rest_are_the_same_on_copies_of_a_shard(ranks, recipe):
    ranks(4, "jobs_gather.accumulated", recipe=recipe, copies=2)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_arrives_as_that(ranks, value):
    assert ranks(2, "jobs_gather.poisoned", recipe="fp8", value=value) == [0, 0]


@pytest.mark.tier("thorough", keep=("msamp-o3",))
@pytest.mark.parametrize("recipe", ["fp8", "msamp-o3"])
def test_no_tokens(ranks, recipe):
    assert ranks(2, "jobs_gather.without_tokens", recipe=recipe) == [[0, D]] * 2


class TestGathered:
    """The tensor that a layer is given, without processes."""

    def make(self, axis=-1):
        w = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
        q = quantize(w, "e4m3", axis)
        return w, q, GatheredWeight(q.codes, q.scales, q.cast, True)

    def test_an_operand_is_that_of_the_whole(self):
        w, q, gathered = self.make()
        values, scale = emulate(w, cast("e4m3"), -1, torch.bfloat16)
        found = gathered.operand(torch.bfloat16, native=False)
        assert torch.equal(found.values, values)
        assert torch.equal(found.scale, scale)
        native, expected = gathered.operand(torch.bfloat16, native=True), quantized_operand(q, -1)
        for ours, theirs in zip(native[:3], expected[:3], strict=True):
            assert torch.equal(ours, theirs)

    def test_along_the_other_axis(self):
        _, _, gathered = self.make()
        _, q, _ = self.make(axis=0)
        native, expected = gathered.operand(torch.bfloat16, native=True).transposed(), quantized_operand(q, 0)
        assert torch.equal(native.codes, expected.codes)

    def test_it_looks_like_float32_and_is_computed_with_as_that(self):
        _, q, gathered = self.make()
        assert (gathered.dtype, gathered.shape) == (torch.float32, (6, 8))
        assert type(gathered.T) is GatheredWeight
        assert torch.equal(gathered.T + 0, q.dequantize().T)
        parameter = torch.nn.Parameter(gathered)
        (torch.ones(2, 6) @ parameter).sum().backward()
        assert torch.equal(parameter.grad, torch.full((6, 8), 2.0))
