"""The mean over tokens taken away and added again: as by hand, in all three matmuls, and refused."""

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.nn import Linear
from narrowgauge.quantization import QuantContext, emulate, make_cast
from narrowgauge.quantization.gauges.figures import figures, gauge_operand
from narrowgauge.quantization.oracle import reference_quantize
from narrowgauge.recipes import parse_recipe
from quantization.by_hand import SMALL, assert_as_by_hand, inputs

CENTERED = {"cast": "nvfp4", "center": "tokens"}
TABLES = {
    "nvfp4": CENTERED,
    "mxfp4": CENTERED | {"cast": "mxfp4"},
    "a tensor": CENTERED | {"cast": "e4m3"},
    "row scaled": CENTERED | {"tensor_scale": "row"},
    "the mean in nvfp4": CENTERED | {"center_cast": "nvfp4"},
}


def shifted(kind="bf16", size=SMALL):
    """Tokens with a mean much larger than what they differ in."""
    x = inputs(size)[kind]
    return x + (4 * torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(1))).to(x.dtype)


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", TABLES)
def test_equals_the_oracle_bit_for_bit(name, axis):
    c = make_cast(TABLES[name])
    for x, dtype in ((shifted(), "bf16"), (shifted("normal"), "fp32"), (inputs(SMALL)["zeros"], "fp32")):
        q = ng.quantize(x, c, axis)
        hand = reference_quantize(x.float().numpy(), c, axis, dtype=dtype)
        np.testing.assert_array_equal(q.mean.numpy().ravel(), hand.mean.astype(np.float32))
        operand, scale = emulate(x, c, axis, torch.bfloat16)
        assert scale is None
        assert torch.equal(operand, q.dequantize())
        np.testing.assert_array_equal(operand.numpy(), hand.dequantize().astype(np.float32))
    assert_as_by_hand(shifted("normal"), c, axis)


def test_what_is_left_is_smaller_and_rounded_better():
    x = shifted("normal", (48, 80))
    error = {
        c: (ng.quantize(x, t).dequantize() - x).norm() for c, t in (("plain", "nvfp4"), ("mean", CENTERED))
    }
    assert error["mean"] < 0.4 * error["plain"]
    c = make_cast(CENTERED)
    seen, _ = emulate(x, c, -1, torch.bfloat16)
    read = figures(gauge_operand(x, seen, c, -1).tolist(), c.element)
    rest = x - x.mean(0)
    assert read["amax"][-1] == pytest.approx(rest.abs().max().item(), rel=1e-5)
    assert 17 < read["sqnr_db"] < 24


def test_a_broken_token_breaks_its_own_blocks():
    x = shifted("normal")
    x[3, 5] = torch.nan
    assert ng.quantize(x, CENTERED).dequantize().isnan().sum() == 16


@pytest.mark.parametrize("axis", [-1, 0])
def test_a_transform_sees_the_rest_and_the_mean_alike(axis):
    """Without rounding to speak of, the operand is the transformed tensor."""
    x, c = shifted("normal", (64, 64)), make_cast({"cast": "mxfp8", "center": "tokens", "hadamard": 32})
    wide = make_cast({"cast": "mxfp8", "hadamard": 32})
    operands = [emulate(x, cast, axis, torch.float32, QuantContext())[0] for cast in (c, wide)]
    assert (operands[0] - operands[1]).norm() < 0.05 * operands[1].norm()


def test_all_three_products_have_the_rank_one_term():
    text = 'compute = "fp32"\nfprop.x = {cast = "mxfp4", center = "tokens"}\n'
    text += 'dgrad.dy = {cast = "mxfp4", center = "tokens"}\nwgrad.dy = {cast = "mxfp4", center = "tokens"}\n'
    text += 'wgrad.x = {cast = "mxfp4", center = "tokens"}'
    layer = Linear(torch.nn.Linear(80, 32, bias=False), parse_recipe(text, "mine"), 0)
    x, dy = shifted("normal", (48, 80)).requires_grad_(), shifted("normal", (48, 80))[:, :32].contiguous()
    y = layer(x)
    y.backward(dy)
    w = layer.weight.detach()

    def seen(t, axis):
        mean = t.double().mean(0).float()
        return ng.quantize(t - mean, "mxfp4", axis).dequantize() + mean

    expected = {
        "y": seen(x.detach(), -1) @ w.T,
        "dx": seen(dy, -1) @ w,
        "dw": seen(dy, 0).T @ seen(x.detach(), 0),
    }
    for got, name in ((y, "y"), (x.grad, "dx"), (layer.weight.grad, "dw")):
        torch.testing.assert_close(got.detach(), expected[name], rtol=1e-4, atol=1e-4)


MISTAKES = {
    'fprop.w = {cast = "nvfp4", center = "tokens"}': "center = 'tokens', but a weight has no tokens",
    'fprop.x = {cast = "nvfp4", center = "rows"}': "unknown center 'rows'",
    'fprop.x = {cast = "bf16", center = "tokens"}': "center = 'tokens', but it is for narrow elements",
    'fprop.x = {cast = "nvfp4", center_cast = "nvfp4"}': "no mean is taken away; add center = 'tokens'",
    'fprop.x = {cast = "nvfp4", center = "tokens", center_cast = "bf16"}': "it must be a cast with scales",
    'fprop.x = {cast = "e4m3", center = "tokens", history = 4}': "outliers and histories are of the tensor",
    'm = {cast = "mxfp4", center = "tokens"}': "center in place 'm', but state has no tokens",
    'saved = "operand"\nfprop.x = {cast = "mxfp4", center = "tokens"}': "but fprop.x has center",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_where_no_mean_can_be_taken_away(text):
    with pytest.raises(UserError, match=MISTAKES[text]):
        parse_recipe(text, "mine")
