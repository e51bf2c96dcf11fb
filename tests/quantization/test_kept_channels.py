"""Channels in another cast: as by hand, their effect, what gauges read of them, and where they cannot be."""

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.formats import decode, random_stream
from narrowgauge.quantization import QuantContext, emulate, kept_count, make_cast, quantize_in_context
from narrowgauge.quantization.gauges.figures import figures, gauge_operand
from narrowgauge.quantization.oracle import reference_quantize
from narrowgauge.recipes import parse_recipe
from quantization.by_hand import SMALL, inputs, integers

KEPT = {"cast": "nvfp4", "keep_channels": 0.1, "keep_cast": "mxfp8"}
TABLES = {
    "nvfp4": KEPT,
    "a scale a tensor": {"cast": "e4m3", "keep_channels": 0.3, "keep_cast": "bf16"},
    "under 128 columns": KEPT | {"tensor_scale": 128, "rounding": "stochastic"},
    "the mean taken away": {"cast": "mxfp4", "center": "tokens", "keep_channels": 0.2, "keep_cast": "e4m3"}
    | {"keep_cast": "mxfp6-e2m3"},
    "candidates": KEPT | {"candidates": [6, 4], "choose": "mae", "keep_cast": "fp32"},
}


# Each table along one axis.
ALONG = list(zip(TABLES, (-1, 0, -1, 0, -1), strict=True))


def with_outliers(kind="normal", size=SMALL, channels=(3, 17)):
    """A tensor whose values in some channels are much larger."""
    x = inputs(size)[kind].clone()
    x[:, list(channels)] *= 40
    return x


@pytest.mark.tier("thorough", keep=("a scale a tensor-0",))
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", TABLES)
def test_equals_the_oracle_bit_for_bit(name, axis):
    c, stream = make_cast(TABLES[name]), random_stream(0, 0, 1)
    for x in (with_outliers(), with_outliers("bf16"), inputs(SMALL)["zeros"], with_outliers("tiny")):
        q = quantize_in_context(x, c, axis, QuantContext(random=stream))
        dtype = "bf16" if x.dtype == torch.bfloat16 else "fp32"
        hand = reference_quantize(x.float().numpy(), c, axis, integers(stream.uniform(x.shape)), dtype=dtype)
        assert tuple(q.channels.nonzero().flatten().tolist()) == hand.channels
        np.testing.assert_array_equal(decode(q.codes, c.element).numpy(), hand.values)
        np.testing.assert_array_equal(q.dequantize().numpy(), hand.dequantize().astype(np.float32))
        operand, scale = emulate(x, c, axis, torch.bfloat16, QuantContext(random=stream))
        numbers = operand.float() if scale is None else operand.float() * scale
        assert torch.equal(numbers, q.dequantize())


def test_the_given_channels_are_kept_whatever_their_norms():
    x, c, given = with_outliers(), make_cast(KEPT), torch.zeros(SMALL[1], dtype=torch.bool)
    given[[1, 8]] = True
    q = quantize_in_context(x, c, -1, QuantContext(channels=given))
    hand = reference_quantize(x.numpy(), c, channels=(1, 8))
    np.testing.assert_array_equal(q.dequantize().numpy(), hand.dequantize().astype(np.float32))


def test_their_number_is_the_share_rounded_and_at_least_one():
    counts = [kept_count(share, 20) for share in (0.01, 0.12, 0.13, 0.5)]
    assert counts == [1, 2, 3, 10]


def test_the_rest_is_rounded_as_if_the_outliers_were_not_there():
    x, quiet = with_outliers(size=(64, 80)), inputs((64, 80))["normal"]
    seen = {k: ng.quantize(x, t).dequantize() for k, t in {"plain": "nvfp4", "kept": KEPT}.items()}
    rest = [k for k in range(80) if k not in (3, 17)]
    error = {k: ((t - x)[:, rest].norm() / x[:, rest].norm()).item() for k, t in seen.items()}
    alone = ng.quantize(quiet, "nvfp4").dequantize() - quiet
    assert error["kept"] < 1.1 * (alone.norm() / quiet.norm()).item() < 0.5 * error["plain"]
    assert ((seen["kept"] - x)[:, [3, 17]].abs() <= x[:, [3, 17]].abs() / 16).all()


def test_a_broken_channel_breaks_only_its_own_blocks():
    x = with_outliers()
    x[2, 3] = torch.nan
    given = torch.zeros(SMALL[1], dtype=torch.bool)
    given[[3, 17]] = True
    seen = quantize_in_context(x, make_cast(KEPT), -1, QuantContext(channels=given)).dequantize()
    assert seen.isnan().nonzero().tolist() == [[2, 3], [2, 17]], "17 has its block of 32"


def test_gauges_read_both_parts():
    x, c = with_outliers(size=(48, 80)), make_cast(KEPT)
    seen, scale = emulate(x, c, -1, torch.float32)
    assert scale is None
    read = figures(gauge_operand(x, seen, c, -1).tolist(), c.element)
    error = (seen - x).square().sum()
    assert read["sqnr_db"] == pytest.approx(10 * (x.square().sum() / error).log10().item(), abs=1e-3)
    assert read["zeros"] == pytest.approx((seen == 0).float().mean().item(), abs=1e-6)
    assert read["underflow"] == pytest.approx(((seen == 0) & (x != 0)).float().mean().item(), abs=1e-6)
    quiet = ng.quantize(x, c).channels.logical_not()
    assert read["amax"][-1] == pytest.approx(x[:, quiet].abs().max().item())
    assert read["clipped"] < 0.05


MISTAKES = {
    'fprop.x = {cast = "nvfp4", keep_channels = 1, keep_cast = "bf16"}': "above 0 and below 1",
    'fprop.x = {cast = "nvfp4", keep_channels = -0.1, keep_cast = "bf16"}': "above 0 and below 1",
    'fprop.x = {cast = "nvfp4", keep_channels = 0, keep_cast = "bf16"}': "keeps no channels; add",
    'fprop.x = {cast = "nvfp4", keep_channels = 0.1}': "their cast is missing; add keep_cast",
    'fprop.x = {cast = "bf16", keep_channels = 0.1, keep_cast = "bf16"}': "the cast itself is wide",
    'fprop.x = {cast = "mxfp8", keep_channels = 0.1, keep_cast = "e4m3"}': "wider than e4m3, such as bf16",
    'fprop.x = {cast = "mxfp8", keep_channels = 0.1, keep_cast = "bf17"}': "unknown cast 'bf17'",
    'fprop.x = {cast = "e4m3", keep_channels = 0.1, keep_cast = "bf16", history = 4}': "leave out history",
    'fprop.x = {cast = "nvfp4", keep_steps = 4}': "there is nothing to choose",
    'fprop.x = {cast = "nvfp4", keep_channels = 0.1, keep_cast = "bf16", keep_steps = 4, keep_every = 3}': (
        "at least keep_steps"
    ),
    'fprop.w = {cast = "nvfp4", keep_channels = 0.1, keep_cast = "bf16"}': "give fprop.x the same",
    'dgrad.w = {cast = "nvfp4", keep_channels = 0.1, keep_cast = "bf16"}': "in dgrad.w, but kept",
    'fprop = {cast = "nvfp4", hadamard = 16, keep_channels = 0.1, keep_cast = "bf16"}': "mixes them",
    'wgrad.dy = {cast = "nvfp4", keep_cast = "bf16"}': "only one operand of wgrad has a cast for kept",
    'fprop.x = {cast = "nvfp4", keep_channels = 0.1, keep_cast = "bf16"}\nwgrad = {cast = "nvfp4", '
    'keep_channels = 0.1, keep_cast = "bf16"}': "it only meets the channels of wgrad.x; write",
    'saved = "operand"\nfprop.x = {cast = "nvfp4", keep_channels = 0.1, keep_cast = "bf16"}': (
        "fprop.x has keep_channels, so its codes are not"
    ),
    'saved = {cast = "mxfp8", keep_channels = 0.1, keep_cast = "bf16"}': "keep_cast belongs to GEMM operands",
    'm = {cast = "mxfp8", keep_channels = 0.1, keep_cast = "bf16"}': "keep_channels in place 'm', but",
    'attention.q = {cast = "mxfp8", keep_channels = 0.1, keep_cast = "bf16"}': "= 0.1, but atten",
    'stream = {cast = "mxfp8", keep_channels = 0.1, keep_cast = "bf16"}': "= 0.1, but the stream",
    'reduce = {cast = "e4m3", keep_channels = 0.1, keep_cast = "bf16"}': "gradients are added up in",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_where_no_channels_can_be_kept(text):
    with pytest.raises(UserError, match=MISTAKES[text]):
        parse_recipe(text, "mine")
