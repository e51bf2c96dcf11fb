"""Element, block and scale as free keys: against the oracle, in recipes, in state, refused in a sentence."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.quantization import QuantizedState, cast, cast_names, emulate, make_cast, state_cast_names
from narrowgauge.quantization.named_casts import SHORTHANDS, STATE_SHORTHANDS
from narrowgauge.recipes import parse_recipe
from quantization.by_hand import SMALL, assert_as_by_hand, inputs

TABLES = {
    "fp4 ue5m3": {"element": "e2m1", "block": 16, "scale": "e5m3"},
    "fp4 e4m3 alone": {"element": "e2m1", "block": 16, "scale": "e4m3"},
    "fp4 bf16 of 32": {"element": "e2m1", "block": 32, "scale": "bf16"},
    "int4 fp32 of 16": {"element": "int4", "block": 16, "scale": "fp32"},
    "int4 e4m3": {"element": "int4", "block": [16, 16], "scale": "e4m3", "tensor_scale": "tensor"},
    "e1m2 e8m0": {"element": "e1m2", "block": 16, "scale": "e8m0"},
    "mxfp8 2d": {"element": "e4m3", "block": [32, 32], "scale": "e8m0"},
    "int8 bf16 a row": {"element": "int8", "block": "row", "scale": "bf16"},
    "e4m3 ue5m3 a tensor": {"element": "e4m3", "scale": "e5m3"},
    "odd blocks": {"element": "e2m1", "block": [3, 10], "scale": "e5m3"},
}
KINDS = ("normal", "bf16", "wide", "tiny", "huge", "zeros", "one outlier", "ragged", "negative zero")


@pytest.mark.tier("thorough", keep=("fp4 ue5m3-0",))
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", TABLES)
def test_equals_the_oracle_bit_for_bit(name, axis):
    for kind, x in inputs(SMALL).items():
        if kind in (KINDS if axis == -1 else ("ragged",)):
            assert_as_by_hand(x, make_cast(TABLES[name]), axis)


@pytest.mark.parametrize("name", TABLES)
def test_the_emulated_operand_is_the_stored_numbers(name):
    for kind in ("normal", "bf16", "ragged", "wide"):
        x, c = inputs()[kind], make_cast(TABLES[name])
        q = ng.quantize(x, c)
        operand, scale = emulate(x, c, -1, torch.bfloat16)
        assert torch.equal(operand.float() * (1.0 if scale is None else scale), q.dequantize()), kind
        is_byte = c.scales.format not in ("fp32", "bf16")
        assert q.scale_codes.dtype == torch.uint8 if is_byte else q.scale_codes is None


def test_a_scale_that_rounds_to_zero_is_one_and_its_block_is_zeros():
    x = torch.cat([torch.full((1, 16), 2.0**-20), torch.full((1, 16), -3.0)])
    q = ng.quantize(x, TABLES["fp4 ue5m3"], rounding="stochastic")
    assert q.scales.tolist() == [[1.0], [0.5]]
    assert q.codes.tolist() == [[0] * 16, [15] * 16]
    q = ng.quantize(torch.full((1, 16), torch.nan), TABLES["fp4 ue5m3"])
    assert q.scale_codes.tolist() == [[0xFC]]
    assert q.dequantize().isnan().all()


@pytest.mark.parametrize("name", [*cast_names(), *state_cast_names()])
def test_a_name_is_a_shorthand_for_its_table(name):
    table = (dict(SHORTHANDS) | STATE_SHORTHANDS)[name]
    if name in cast_names():
        assert make_cast(table) == make_cast({"cast": name}) == cast(name)
    assert cast(name).element.name == table["element"]


def test_names_of_casts_that_have_none():
    assert make_cast(TABLES["fp4 ue5m3"]).name == "e2m1-1x16-e5m3"
    assert make_cast(TABLES["int4 e4m3"]).name == "int4-16x16-e4m3-per-tensor"
    assert make_cast(TABLES["e4m3 ue5m3 a tensor"]).name == "e4m3-tensor-e5m3"
    assert make_cast({"cast": "mxfp8", "block": [32, 32]}).name == "e4m3-32x32-e8m0"
    assert make_cast({"cast": "mxfp8", "scale": "fp32", "block": 128}) == cast("fp8-1x128")
    assert make_cast({"cast": "nvfp4", "rounding": "stochastic"}).name == "nvfp4"


@pytest.mark.parametrize("name", ["fp4 ue5m3", "fp4 bf16 of 32", "int4 fp32 of 16", "int4 e4m3"])
def test_state_keeps_what_quantize_gives(name):
    c, x = make_cast(TABLES[name]), inputs()["normal"]
    state = QuantizedState(x.shape, c, "cpu")
    state.write(x)
    assert torch.equal(state.read(), ng.quantize(x, c).dequantize())
    scale_bytes = {"fp32": 4, "bf16": 2}.get(c.scales.format, 1)
    level = 4 if c.scales.outer == "tensor" else 0
    blocks = ng.quantize(x, c).scales.numel()
    assert state.nbytes == x.numel() // 2 + scale_bytes * blocks + level


def test_in_a_recipe_and_over_one():
    table = '{element = "e2m1", block = 16, scale = "e5m3"}'
    recipe = parse_recipe(f"fprop = {table}\nwgrad.dy = {table}\nm = {table}", "mine")
    c = make_cast(TABLES["fp4 ue5m3"])
    assert recipe.casts["fprop.x"] == recipe.casts["fprop.w"] == recipe.casts["wgrad.dy"] == c
    assert recipe.state["m"] == c
    assert recipe.with_places({"dgrad": TABLES["mxfp8 2d"]}).casts["dgrad.w"].block == (32, 32)


MISTAKES = {
    "cast 'e2m1-1x16-e8m0-per-tensor': tensor_scale = 'tensor', but it stands over block scales": {
        "element": "e2m1",
        "block": 16,
        "scale": "e8m0",
        "tensor_scale": "tensor",
    },
    "tensor_scale = 'tensor', but the block is the tensor": {"cast": "nvfp4", "block": "tensor"},
    "element = 'e5m3', but it is a format of scales": {"element": "e5m3"},
    "scale = 'none', but narrow elements need one": {"element": "e2m1", "scale": "none"},
    "scale = 'none', but a block shares a scale": {"element": "bf16", "block": 16},
    "scale = 'e4m3', but elements of more than a byte": {"element": "bf16", "block": 16, "scale": "e4m3"},
    "unknown scale 'e4m4'; the nearest is 'e4m3'": {"element": "e2m1", "scale": "e4m4"},
    "unknown format 'e2m9'": {"element": "e2m9"},
    "cast key block = 0, but it must be": {"element": "e2m1", "block": 0},
    r"cast key block = \[16\], but it must be": {"element": "e2m1", "block": [16]},
    'cast key block = \'column\', but it must be "tensor", "row", a number': {
        "cast": "e4m3",
        "block": "column",
    },
    "cast key block = 1.5, but it must be": {"element": "e2m1", "block": 1.5},
    "a scale rule belongs to E8M0 scales only": {"element": "e2m1", "scale": "e5m3", "scale_rule": "ceil"},
    "power_of_two = True, but it cuts scales in fp32": {"cast": "mxfp8", "power_of_two": True},
    "unknown cast key 'split'": {"element": "bf16", "split": True},
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_keys_that_contradict_each_other(sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        ng.quantize(torch.ones(16, 16), MISTAKES[sentence])
    assert "\n" not in str(caught.value)


def test_a_block_of_rows_needs_a_matrix():
    with pytest.raises(UserError, match="has blocks of 32x32: it needs a matrix, not a vector"):
        ng.quantize(torch.ones(32), TABLES["mxfp8 2d"])
