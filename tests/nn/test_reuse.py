"""A place that takes the numbers of another one: as they are, rounded once more, kept, or refused."""

import pytest
import torch

from narrowgauge.errors import UserError
from narrowgauge.nn import Linear
from narrowgauge.quantization import make_cast, quantize
from narrowgauge.recipes import Device, choose_backend, parse_recipe, recipe

M, K, N = 64, 96, 32
DEQUANTIZED = """
compute = "fp32"
fprop = "mxfp4"
dgrad.w = "fprop.w"
wgrad.x = "fprop.x"
"""
TWICE = """
compute = "fp32"
fprop = {element = "e2m1", block = 16, scale = "e5m3"}
dgrad.w = {cast = "nvfp4", of = "fprop.w"}
wgrad.x = {cast = "mxfp8", of = "fprop.x"}
wgrad.dy = {of = "dgrad.dy"}
dgrad.dy = {cast = "mxfp8", rounding = "stochastic"}
"""


def gradients(text, w=None, x=None, dy=None, **places):
    """(layer, y, dx, dw, x, w, dy) of a layer under a recipe."""
    g = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(K, N, bias=False)
    layer.weight.data = torch.randn(N, K, generator=g) if w is None else w
    x = (torch.randn(M, K, generator=g) if x is None else x).requires_grad_()
    dy = torch.randn(M, N, generator=g) if dy is None else dy
    layer = Linear(layer, parse_recipe(text, "mine").with_places(places), 0)
    layer.set_position(1, 2, 0)
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad, x.detach(), layer.weight.detach(), dy


def seen(x, cast, axis=-1):
    return quantize(x, make_cast(cast), axis).dequantize()


def test_products_of_the_numbers_that_the_forward_pass_saw():
    y, dx, dw, x, w, dy = gradients(DEQUANTIZED)
    x, w = seen(x, "mxfp4"), seen(w, "mxfp4")
    torch.testing.assert_close(y, x @ w.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx, dy @ w, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dw, dy.T @ x, rtol=1e-5, atol=1e-5)


def test_numbers_that_are_rounded_twice():
    _, dx, dw, x, w, dy = gradients(TWICE, **{"dgrad.dy": "mxfp8"})
    first = {"element": "e2m1", "block": 16, "scale": "e5m3"}
    dy = seen(dy, "mxfp8")
    twice_w, twice_x = seen(seen(w, first), "nvfp4", 0), seen(seen(x, first), "mxfp8", 0)
    torch.testing.assert_close(dx, dy @ twice_w, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dw, dy.T @ twice_x, rtol=1e-5, atol=1e-5)
    assert not torch.equal(seen(w, first), twice_w)


def test_random_numbers_are_drawn_once():
    """With identities for the other operand, matmuls show what they saw."""
    x = torch.randn(M, K)
    text = 'compute = "fp32"\nfprop.x = {cast = "mxfp4", rounding = "stochastic"}\nwgrad.x = "fprop.x"'
    eye = torch.eye(K)
    layer = torch.nn.Linear(K, K, bias=False)
    layer.weight.data = eye
    layer = Linear(layer, parse_recipe(text, "mine"), 0)
    layer.set_position(1, 2, 0)
    y = layer(x)
    y.backward(torch.eye(M, K))
    assert torch.equal(layer.weight.grad[:M], y.detach())
    assert not torch.equal(y.detach(), seen(x, "mxfp4"))
    y, dx, dw, *_ = gradients(TWICE, w=6 * torch.eye(N, K), x=6 * torch.eye(M, K))
    torch.testing.assert_close(dx[:, :N], dw[:, :M].T, rtol=1e-6, atol=0)  # another order of scales


@pytest.mark.parametrize("fprop", ["nvfp4", "e4m3", "fp8-1x128", {"cast": "nvfp4", "tensor_scale": "row"}])
def test_codes_that_are_kept_are_the_same_numbers(fprop):
    places = {"fprop": fprop} if isinstance(fprop, str) else {"fprop.x": fprop, "fprop.w": fprop}
    wide = gradients(DEQUANTIZED, **places)
    narrow = gradients(DEQUANTIZED, saved="operand", **places)
    assert all(torch.equal(a, b) for a, b in zip(wide[:3], narrow[:3], strict=True))


def test_weights_still_travel_in_the_numbers_that_both_products_see():
    r = recipe("fp8").with_places({"dgrad.w": "fprop.w"})
    assert r.gather.name == "e4m3"
    assert recipe("fp8").with_places({"dgrad.w": {"cast": "e4m3", "of": "fprop.w"}}).gather.name == "fp32"


def test_it_is_emulated_everywhere_and_says_why():
    h100 = Device(maker="nvidia", capability=(9, 0), library=(13, 0))
    backend = choose_backend(recipe("fp8").with_places({"dgrad.w": "fprop.w"}), h100)
    assert backend.name == "emulated"
    assert "dgrad multiplies e5m2 by fprop.w, which torch does on no device" in backend.reason


MISTAKES = {
    'dgrad.w = "fprop.x"': r"'fprop\.x', but that is another tensor, of another shape; the place that sees "
    r"this one before is 'fprop\.w'",
    'fprop.x = "fprop.w"': r"fprop\.x = 'fprop\.w', but no place sees its tensor before; name a cast",
    'fprop.w = "dgrad.w"': r"fprop\.w = 'dgrad\.w', but no place sees its tensor before",
    'fprop = {cast = "mxfp4", hadamard = 32}\ndgrad.w = "fprop.w"': r"fprop\.w is transformed \(hadamard\)",
    'saved = "mxfp8"\nwgrad.x = "fprop.x"': r"wgrad\.x = 'fprop\.x' with saved = 'mxfp8', but",
    'm = {cast = "e4m3", of = "fprop.w"}': r"m = 'fprop\.w', but only dgrad\.w, wgrad\.x, wgrad\.dy take",
    '[[rule]]\nmodules = ["up"]\nwgrad.x = "fprop.w"': r"rule 1: wgrad\.x = 'fprop\.w', but that is another",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_places_that_cannot_share(text):
    with pytest.raises(UserError, match=MISTAKES[text]):
        parse_recipe(text, "mine")
