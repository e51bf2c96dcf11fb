"""Second-level scales, targets, rounding of scales, zero scales, headroom: as by hand, or refused."""

import math

import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.formats import format
from narrowgauge.quantization import QuantContext, QuantizedState, emulate, make_cast, quantize_in_context
from narrowgauge.quantization.scales import FLOAT_MAX, e8m0_code
from quantization.by_hand import SMALL, assert_as_by_hand, inputs

E5M3 = {"element": "e2m1", "block": 16, "scale": "e5m3", "tensor_scale": "tensor"}
TABLES = {
    "ue5m3 under a tensor scale": E5M3,
    "ue5m3 that aims at 2048": E5M3 | {"scale_target": 2048},
    "ue5m3 under a row's": E5M3 | {"tensor_scale": "row"},
    "bf16 under a tensor scale": {"element": "int4", "block": 32, "scale": "bf16", "tensor_scale": "tensor"},
    "nvfp4 by row": {"cast": "nvfp4", "tensor_scale": "row"},
    "nvfp4 by 32 columns": {"cast": "nvfp4", "tensor_scale": 32},
    "ue5m3 by 16 columns": E5M3 | {"block": 8, "tensor_scale": 16},
    "nvfp4 that aims at 256": {"cast": "nvfp4", "scale_target": 256},
    "nvfp4 with ones": {"cast": "nvfp4", "zero_scale": "one"},
    "nvfp4 without zeros": {"cast": "nvfp4-2d", "zero_scale": "smallest"},
    "ue5m3 that keeps zeros": E5M3 | {"zero_scale": "zero"},
    "ue5m3 without zeros": {"element": "e2m1", "block": 16, "scale": "e5m3", "zero_scale": "smallest"},
    "headroom of 17/16": {"cast": "nvfp4", "headroom": 17 / 16},
    "headroom of .93": {"cast": "fp4-row", "headroom": 0.93},
    "headroom under powers of two": {"cast": "mxfp4", "headroom": 16 / 17},
    "headroom of a quotient": {"element": "e2m1", "block": 16, "scale": "e4m3", "headroom": 1.25},
}
RANDOM = {
    "scales": {"cast": "nvfp4", "scale_rounding": "stochastic"},
    "scales and elements": E5M3 | {"scale_rounding": "stochastic", "rounding": "stochastic"},
    "scales in bf16": {"element": "e2m1", "block": 16, "scale": "bf16", "scale_rounding": "stochastic"},
    "scales down": {"element": "e2m1", "block": 16, "scale": "e4m3", "scale_rounding": "toward-zero"},
}
KINDS = (
    "normal",
    "bf16",
    "wide",
    "tiny",
    "subnormal",
    "huge",
    "zeros",
    "one outlier",
    "ragged",
    "negative zero",
)


@pytest.mark.tier("thorough", keep=("ue5m3 under a tensor scale-0",))
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", TABLES)
def test_equals_the_oracle_bit_for_bit(name, axis):
    for kind, x in inputs(SMALL).items():
        if kind in (KINDS if axis == -1 else ("ragged",)):
            assert_as_by_hand(x, make_cast(TABLES[name]), axis)


@pytest.mark.tier("thorough", keep=2)
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", RANDOM)
def test_rounded_scales_take_the_bits_of_their_stream(name, axis):
    for kind in ("normal", "wide", "ragged", "zeros"):
        assert_as_by_hand(inputs(SMALL)[kind], make_cast(RANDOM[name]), axis, key=7)


def test_zero_scale_smallest_keeps_a_block_whose_scale_rounds_to_zero():
    table = {"element": "e2m1", "block": 16, "scale": "e5m3"}
    x = torch.full((1, 16), 2.0**-18)  # its scale would be 2^-18 / 6, less than half of e5m3's smallest
    q = ng.quantize(x, table | {"zero_scale": "smallest"})
    assert (q.scales.item(), q.dequantize().unique().item()) == (2.0**-17, 2.0**-18)
    assert not ng.quantize(x, table | {"zero_scale": "zero"}).dequantize().any()


def test_tensor_scale_undoes_an_encoding_scale_that_is_cut_to_the_largest_float():
    x = torch.full((1, 16), 2.0**-126)
    q = ng.quantize(x, "nvfp4")
    assert 448 * 6 / x[0, 0].item() > FLOAT_MAX
    assert q.tensor_scale.item() == (1 / torch.tensor(FLOAT_MAX)).item()


def test_scales_that_are_rounded_at_random_are_unbiased():
    x = torch.randn(1, 16, generator=torch.Generator().manual_seed(3)).expand(4000, 16)
    table = {"element": "e2m1", "block": 16, "scale": "e4m3", "scale_rounding": "stochastic"}
    for generator in (torch.Generator().manual_seed(1), torch.rand(4000, 16)):
        scales = ng.quantize(x, table, generator=generator).scales
        exact, (low, high) = x[0].abs().max().item() / 6, sorted(set(scales.flatten().tolist()))
        assert low < exact < high
        share = (exact - low) / (high - low)
        assert abs((scales == high).float().mean() - share) < 5 * math.sqrt(share * (1 - share) / 4000)


@pytest.mark.parametrize("name", ["ue5m3 under a tensor scale", "ue5m3 under a row's", "nvfp4 by row"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_the_emulated_operand_is_the_stored_numbers(name, axis):
    for kind in ("normal", "bf16", "ragged", "wide"):
        x, c = inputs()[kind], make_cast(TABLES[name])
        operand, scale = emulate(x, c, axis, torch.bfloat16)
        assert torch.equal(
            operand.float() * (1.0 if scale is None else scale), ng.quantize(x, c, axis).dequantize()
        )


def test_rceil_meets_the_smallest_scale_exactly():
    amax = torch.tensor([6 * 2.0**-127, 6 * 2.0**-127 * (1 + 2.0**-20), 12 * 2.0**-127])
    assert e8m0_code(amax, format("e2m1"), "rceil").tolist() == [0, 1, 1]


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_scales_from_2_to_minus_127_down_have_code_0(rule):
    amax = torch.tensor([2.0**-149, 2.0**-126, 2.0**-125, 2.0**-124])
    assert e8m0_code(amax, format("e2m1"), rule).tolist() == [0, 0, 0, 1]


def test_a_broken_row_breaks_no_other():
    x = torch.randn(4, 32)
    whole = ng.quantize(x, TABLES["nvfp4 by row"])
    assert whole.tensor_scale.shape == (4, 1)
    x[1, 3] = math.nan
    q = ng.quantize(x, TABLES["nvfp4 by row"])
    assert q.dequantize().isnan().sum() == 16
    assert torch.equal(q.codes[[0, 2, 3]], whole.codes[[0, 2, 3]])


def test_a_row_scaled_operand_is_every_row_by_itself():
    """As TransformerEngine defines it: NVFP4 of each row as if it were a tensor."""
    x, c = inputs()["wide"], make_cast(TABLES["nvfp4 by row"])
    q = quantize_in_context(x, c, -1, QuantContext())
    for r in range(0, len(x), 7):
        row = ng.quantize(x[r : r + 1], "nvfp4")
        assert torch.equal(q.codes[r], row.codes[0])
        assert torch.equal(q.scales[r], row.scales[0])
        assert q.tensor_scale[r].item() == row.tensor_scale.item()


FLOOR = {"cast": "mxfp4", "scale_rule": "floor", "headroom": 0.5}
MISTAKES = {
    "scale_target = 448, but it is what scales in bf16, e4m3, e5m3 aim": {
        "cast": "mxfp4",
        "scale_target": 448,
    },
    "scale_target = 999, but it must lie above 0 and not above": {
        "cast": "nvfp4",
        "scale_target": 999,
    },
    "scale_rounding = 'half-away', but it belongs to": {"cast": "mxfp4", "scale_rounding": "half-away"},
    "zero_scale = 'one', but it belongs to scales in": {"cast": "e4m3", "zero_scale": "one"},
    "unknown zero scale 'two'": {"cast": "nvfp4", "zero_scale": "two"},
    "unknown tensor scale 'rows'; the nearest is 'row'": {"cast": "nvfp4", "tensor_scale": "rows"},
    "tensor_scale = '24', but this must be a whole number of blocks": {"cast": "nvfp4", "tensor_scale": 24},
    "unknown tensor scale '0'": {"cast": "nvfp4", "tensor_scale": 0},
    "tensor_scale = 'row', but a row needs several blocks": {"cast": "nvfp4-2d", "tensor_scale": "row"},
    "headroom = 3, but it must lie above 0 and not above 2": {"cast": "nvfp4", "headroom": 3},
    "headroom = 0.5, but of the rules for E8M0 scales only rceil": FLOOR,
    "headroom = 0.5, but a history leaves room": {"cast": "e4m3", "history": 4, "headroom": 0.5},
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_keys_that_contradict_each_other(sentence):
    with pytest.raises(UserError, match=sentence):
        make_cast(MISTAKES[sentence])


def test_rows_of_state_have_no_scales_of_their_own():
    with pytest.raises(UserError, match=r"'row' in place 'm', but it belongs to GEMM operands"):
        ng.recipe("bf16").with_places({"m": TABLES["nvfp4 by row"]})
    state = QuantizedState(torch.Size((8, 32)), make_cast(TABLES["ue5m3 under a tensor scale"]), "cpu")
    state.write(x := torch.randn(8, 32))
    assert torch.equal(state.read(), ng.quantize(x, TABLES["ue5m3 under a tensor scale"]).dequantize())
