"""Weights on the wire: cut by FSDP and gathered in low precision, a model computes as if it were whole."""

import math

import pytest
import torch

from narrowgauge.nn.gemm import quantized_operand
from narrowgauge.nn.weight import GatheredWeight
from narrowgauge.quantization import cast, emulate, quantize

D = 16
SIZES = {"fp8": 1, "fp8-fnuz": 1, "msamp-o3": 1, "mxfp8": 4}  # else 2
WIDE = {"reduce": "fp32"}  # sums are compared with one process's


def bytes_of_a_gather(world, width, size):
    """What a rank sends of one block: rows are dealt out evenly, the last ranks' filled up."""
    weights = [-(-width // world) * D, -(-D // world) * width]
    others = 3 * -(-D // world) + -(-width // world)  # norm, gain and bias
    return (world - 1) * (size * sum(weights) + 4 * others)


LIKE = "jobs_comm.like_the_whole"
#: Processes, recipe, how; a gather's bytes are counted where weights are cut again.
CASES = [
    (2, "fp8", {"places": WIDE}),
    (2, "fp8", {"reshard": False}),
    (2, "msamp-o2", {"places": WIDE, "transposed": True}),
    (3, "msamp-o3", {"places": WIDE, "width": 13}),
    (3, "msamp-o3", {"places": WIDE, "width": 2}),  # the last rank has no row
    (4, "msamp-o3", {"places": WIDE, "copies": 2}),
    (2, "bf16-sr", {"places": WIDE}),
    (2, "fp8", {"places": {"gather": "fp32"}}),
    (2, "coat", {"places": {"grad": {"cast": "bf16", "rounding": "stochastic"}}}),
    (4, "fp8", {"width": 13}),  # the last rank has one row
    (2, "msamp-o3", {"places": {**WIDE, "gather": "fp32"}}),
    (2, "fp8", {"places": {"grad": "e4m3"}}),
    (2, "msamp-o1", {"places": WIDE, "reshard": False}),
    *[(2, name, {"places": WIDE}) for name in ("fp8-fnuz", "bf16", "fp16", "mxfp8")],
    *[(3, name, {"places": WIDE, "width": 13}) for name in ("fp8", "bf16-sr", "msamp-o2")],
]


@pytest.mark.tier("nightly", keep=9)
@pytest.mark.tier("thorough", keep=2)
@pytest.mark.parametrize(("world", "recipe", "how"), CASES, ids=str)
def test_ranks_compute_as_one(ranks, world, recipe, how):
    """Outputs, gradients and weights of two steps; every byte of a gather."""
    for found in ranks(world, LIKE, recipe=recipe, **how):
        if how.get("places") == WIDE and "copies" not in how and "transposed" not in how:
            times = 2 if "reshard" in how else 4  # two blocks, gathered forward and, if cut, backward
            size = bytes_of_a_gather(world, how.get("width", 24), SIZES.get(recipe, 2))
            assert [sent["gather"] for sent in found["sent"]] == [times * size] * 2
            assert [calls["gather"] for calls in found["calls"]] == [times] * 2


@pytest.mark.tier("thorough")
def test_scales_are_agreed_on_once_for_all_layers(ranks):
    (found, _) = ranks(2, LIKE, recipe="fp8")
    assert found["renewed"] == [{"amax": 4 * 4}, {"amax": 1}]  # four weights
    assert found["calls"][0]["amax"] == 4  # each alone, since no step has done it before
    assert "amax" not in found["calls"][1]


@pytest.mark.tier("thorough", keep=("fp8",))
@pytest.mark.parametrize(
    ("recipe", "numbers", "kept"),
    [
        ("fp8", "uint8", []),
        ("msamp-o2", "float16", ["grad", "weight"]),
        ("msamp-o3", "uint8", ["grad", "master", "weight"]),
    ],
)
def test_a_weight_is_given_back_after_its_forward_pass(ranks, recipe, numbers, kept):
    """Its record is that of its shards."""
    looks = ["torch.float32", f"torch.{numbers}", "GatheredWeight((24, 16)"]
    for found in ranks(2, "jobs_comm.what_is_computed_with", recipe=recipe):
        looks_like = [text[: len(looks[-1])] for text in found.pop("looks")]
        assert looks_like == looks
        assert found == {"gathered": True, "memory": 0, "kept": kept}


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", ["msamp-o2", "bf16-sr"])
def test_gradients_at_rest_are_the_same_on_copies_of_a_shard(ranks, recipe):
    ranks(4, "jobs_comm.accumulated", recipe=recipe, copies=2)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_arrives_as_that(ranks, value):
    assert ranks(2, "jobs_comm.poisoned", recipe="fp8", value=value) == [0, 0]


@pytest.mark.tier("thorough", keep=("msamp-o3",))
@pytest.mark.parametrize("recipe", ["fp8", "msamp-o3"])
def test_no_tokens(ranks, recipe):
    assert ranks(2, "jobs_comm.without_tokens", recipe=recipe) == [[0, D]] * 2


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
        assert torch.equal(found.elements, values)
        assert torch.equal(found.scale, scale)
        native, expected = gathered.operand(torch.bfloat16, native=True), quantized_operand(q, -1)
        for ours, theirs in zip(native[:4], expected[:4], strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs)

    def test_along_the_other_axis(self):
        _, _, gathered = self.make()
        _, q, _ = self.make(axis=0)
        native, expected = gathered.operand(torch.bfloat16, native=True).transposed(), quantized_operand(q, 0)
        assert torch.equal(native.elements, expected.elements)

    def test_it_looks_like_float32_and_is_computed_with_as_that(self):
        _, q, gathered = self.make()
        assert (gathered.dtype, gathered.shape) == (torch.float32, (6, 8))
        assert type(gathered.T) is GatheredWeight
        assert torch.equal(gathered.T + 0, q.dequantize().T)
        parameter = torch.nn.Parameter(gathered)
        (torch.ones(2, 6) @ parameter).sum().backward()
        assert torch.equal(parameter.grad, torch.full((6, 8), 2.0))
