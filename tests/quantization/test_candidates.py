"""Four over six: blocks mapped to several magnitudes, the best kept; as by hand, or refused."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.formats import random_stream
from narrowgauge.quantization import QuantContext, emulate, make_cast, quantize_in_context
from quantization.by_hand import SMALL, assert_as_by_hand, inputs

FOUR_OVER_SIX = {"cast": "nvfp4", "candidates": [6, 4], "choose": "mae"}
E5M3 = {"element": "e2m1", "block": 16, "scale": "e5m3", "candidates": [6, 4], "choose": "mse"}
TABLES = {
    "mae": FOUR_OVER_SIX,
    "mse": FOUR_OVER_SIX | {"choose": "mse"},
    "max": FOUR_OVER_SIX | {"choose": "max"},
    "mae of squares": FOUR_OVER_SIX | {"block": [16, 16]},
    "mse of odd blocks": FOUR_OVER_SIX | {"block": [6, 5], "choose": "mse"},
    "mae by row, aiming at 448": FOUR_OVER_SIX | {"tensor_scale": "row", "scale_target": 448},
    "three of int4": FOUR_OVER_SIX | {"element": "int4", "candidates": [7, 5, 3.5]},
    "ue5m3 alone": E5M3,
    "ue5m3 under a tensor scale": E5M3 | {"tensor_scale": "tensor"},
    "headroom": FOUR_OVER_SIX | {"headroom": 16 / 17},
}


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", TABLES)
def test_equals_the_oracle_bit_for_bit(name, axis):
    for kind, x in inputs(SMALL).items():
        if kind in (("normal", "bf16", "wide", "tiny", "zeros", "ragged") if axis == -1 else ("ragged",)):
            assert_as_by_hand(x, make_cast(TABLES[name]), axis)


def test_random_elements_are_compared_by_the_bits_that_they_are_rounded_with():
    c = make_cast(FOUR_OVER_SIX | {"rounding": "stochastic"})
    assert_as_by_hand(inputs(SMALL)["normal"], c, -1, key=3)
    drawn = ng.quantize(inputs()["normal"], c, generator=torch.Generator().manual_seed(0))
    numbers = torch.rand(inputs()["normal"].shape, generator=torch.Generator().manual_seed(0))
    again = quantize_in_context(inputs()["normal"], c, -1, QuantContext(numbers))
    assert torch.equal(drawn.dequantize(), again.dequantize())


@pytest.mark.parametrize("choose", ["mae", "mse", "max"])
def test_no_block_is_worse_than_with_six_alone(choose):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    c = make_cast(FOUR_OVER_SIX | {"choose": choose})
    six = make_cast({"cast": "nvfp4", "scale_target": 256})

    def errors(cast):
        e = (ng.quantize(x, cast).dequantize() - x).unflatten(1, (-1, 16)).double().abs()
        return {"mae": e.mean(-1), "mse": e.square().mean(-1), "max": e.amax(-1)}[choose]

    assert (errors(c) <= errors(six) * (1 + 1e-5)).all()
    assert errors(c).mean() < 0.95 * errors(six).mean()


def test_equal_errors_keep_the_first():
    x = torch.zeros(1, 32)
    x[0, 0] = 6 * 256  # the tensor scale is 1, and so is that of a block of whole numbers
    x[0, 16:20] = torch.tensor([4.0, 2.0, 1.0, 0.5])
    q = ng.quantize(x, FOUR_OVER_SIX)
    assert q.scales.tolist() == [[256, 1]]  # 4 is nowhere better in the first, but exact in the second
    swapped = ng.quantize(x, FOUR_OVER_SIX | {"candidates": [4, 6]})
    assert swapped.scales.tolist() == [[384, 1]]


def test_the_emulated_operand_is_the_stored_numbers():
    for name in ("mae", "mae by row, aiming at 448", "ue5m3 under a tensor scale"):
        x, c = inputs()["wide"], make_cast(TABLES[name])
        operand, scale = emulate(x, c, -1, torch.bfloat16, QuantContext(random_stream(0, 0, 0)))
        operand = operand.float() * (1.0 if scale is None else scale)
        assert torch.equal(operand, ng.quantize(x, c).dequantize())


MISTAKES = {
    "candidates = \\(6, 4\\), but a choice is missing; add choose = 'mae'": {
        "cast": "nvfp4",
        "candidates": [6, 4],
    },
    "choose = 'mae', but there are no candidates; add": {"cast": "nvfp4", "choose": "mae"},
    "unknown choice 'mean'": {"cast": "nvfp4", "candidates": [6, 4], "choose": "mean"},
    "two or more numbers above 0 and not above 6": FOUR_OVER_SIX | {"candidates": [8, 6]},
    "cast key candidates = .*, but it must be a list of numbers": FOUR_OVER_SIX | {"candidates": [6, "4"]},
    "candidates = .*, but they belong to scales in bf16, e4m3": FOUR_OVER_SIX | {"cast": "mxfp4"},
    "they need blocks of a fixed size, such as 16": FOUR_OVER_SIX | {"block": "row"},
    "cast key candidates = .*'int4'.*, but it must be a list": FOUR_OVER_SIX
    | {"candidates": ["e2m1", "int4"]},
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_keys_that_contradict_each_other(sentence):
    with pytest.raises(UserError, match=sentence):
        make_cast(MISTAKES[sentence])
