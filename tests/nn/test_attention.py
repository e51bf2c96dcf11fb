"""Attention in low precision, against loops over numbers; wide, against torch's own."""

import math

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.formats import RandomStream
from narrowgauge.kernels.attention import document_mask
from narrowgauge.nn.transformer import places
from narrowgauge.nn.transformer.places import AttentionContext, narrow_attention
from narrowgauge.quantization import make_cast
from narrowgauge.system.errors import UserError
from oracle import reference_quantize

B, N, K, T, H = 2, 2, 1, 16, 16
TENSORS = ("q", "k", "v", "p", "do", "ds")
PRODUCTS = ("q kᵀ", "p v", "pᵀ do", "do vᵀ", "ds k", "dsᵀ q")
NVFP4, SQUARE = {"cast": "nvfp4", "block": 8}, {"cast": "nvfp4", "block": [8, 8]}
STOCHASTIC = NVFP4 | {"rounding": "stochastic"}
RECIPES = {
    "a scale a tensor": ["e4m3", "e4m3", "e4m3", "e4m3", "e5m2", "e5m2"],
    "blocks along what is contracted": [{"cast": "mxfp8", "block": 8}] * 6,
    "square blocks, a scale a row": ["fp8-row", {"cast": "mxfp4", "block": [8, 8]}, *[SQUARE] * 4],
    "two scales, random gradients": [*[NVFP4] * 4, STOCHASTIC, STOCHASTIC],
    "one side transformed": [*[{"cast": "mxfp4", "block": 8, "hadamard": 16}] * 2, *["bf16"] * 4],
    "a narrow gradient beside a wide one": [NVFP4, NVFP4, "bf16", "bf16", "bf16", NVFP4],
}


def casts_of(name):
    return {f"attention.{t}": make_cast(c) for t, c in zip(TENSORS, RECIPES[name], strict=True)}


def tensors(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    sizes = [(B, N, T, H), (B, K, T, H), (B, K, T, H), (B, N, T, H)]
    return [torch.randn(size, generator=g).bfloat16().to(dtype) for size in sizes]


def documents():
    return document_mask(torch.stack([torch.arange(T) % 12, torch.arange(T)]))


def computed(q, k, v, dy, mask, context):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    y = narrow_attention(*leaves, mask, context)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


KEYS = torch.randint(0, 2**31, (12, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(5))
FIRST = 3  # of the step's sequences


@pytest.mark.parametrize("mask", [None, documents()], ids=["causal", "documents"])
def test_wide_attention_is_torchs(mask):
    q, k, v, dy = tensors()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    y = torch.nn.functional.scaled_dot_product_attention(
        *leaves, mask, is_causal=mask is None, enable_gqa=True
    )
    expected = [y, *torch.autograd.grad(y, leaves, dy)]
    for got, of_torch in zip(computed(q, k, v, dy, mask, AttentionContext({})), expected, strict=True):
        torch.testing.assert_close(got, of_torch, rtol=1e-14, atol=1e-14)


class ByHand:
    """Attention in float64: every tensor quantized by the exact oracle."""

    def __init__(self, casts):
        self.casts = casts

    def operand(self, x, place, product, axis):
        """(numbers without the scale of the full tensor, that scale) of [B, heads, rows, columns]."""
        cast = self.casts[f"attention.{place}"]
        gradient = "do" if "do" in product else "ds" if "ds" in product else place
        if place != gradient and not self.casts[f"attention.{gradient}"].is_scaled:
            return x, 1.0
        if not cast.is_scaled:
            return torch.tensor(x).to(torch.bfloat16).double().numpy(), 1.0
        draws = None
        if cast.rounding == "stochastic":
            side = product.replace("ᵀ", "").split().index(place)
            stream = RandomStream(KEYS[2 * PRODUCTS.index(product) + side])
            index = FIRST * x[0].size + np.arange(x.size).reshape(x.shape)
            draws = (stream.uniform_at(torch.tensor(index)).double() * 2**24).long().numpy()
        q = reference_quantize(x.astype(np.float32), cast, axis, draws)
        if cast.block is None:
            return q.values, next(iter(q.scales.values()))
        numbers = np.zeros_like(q.values)
        extent = [1] * x.ndim
        extent[axis] = cast.block[1] or x.shape[axis]
        extent[-1 if axis == -2 else -2] = cast.block[0]
        for corner, scale in q.scales.items():
            block = tuple(slice(i, i + e) for i, e in zip(corner, extent, strict=True))
            numbers[block] = (q.values[block] * scale).astype(np.float32)
        return numbers, q.tensor_scale

    def product(self, name, a, b):
        """The named product of tensors [B, heads, rows, columns]; heads of the second are shared."""
        places = name.replace("ᵀ", "").split()
        turns = ["pᵀ" in name or "dsᵀ" in name, "kᵀ" not in name and "vᵀ" not in name]
        (x, sx), (y, sy) = (
            self.operand(t, place, name, -2 if turned else -1)
            for t, place, turned in zip((a, b), places, turns, strict=True)
        )
        x = x.swapaxes(-1, -2) if turns[0] else x
        y = y if turns[1] else y.swapaxes(-1, -2)
        x, y = (np.repeat(t, N // t.shape[1], axis=1) for t in (x, y))
        return (x @ y) * float(np.float32(sx) * np.float32(sy))

    def __call__(self, q, k, v, dy, mask):
        q, k, v, dy = (t.numpy() for t in (q, k, v, dy))
        sees = np.tril(np.ones((T, T), bool))[None, None] if mask is None else mask.numpy()
        z = np.where(sees, self.product("q kᵀ", q, k) * H**-0.5, -math.inf)
        powers = np.vectorize(math.exp)(z - z.max(-1, keepdims=True))
        p = powers / np.apply_along_axis(math.fsum, -1, powers)[..., None]
        y, dv, dp = self.product("p v", p, v), self.product("pᵀ do", p, dy), self.product("do vᵀ", dy, v)
        ds = p * (dp - np.apply_along_axis(math.fsum, -1, p * dp)[..., None])
        dq, dk = self.product("ds k", ds, k) * H**-0.5, self.product("dsᵀ q", ds, q) * H**-0.5
        return [y, dq, *(d.reshape(B, K, N // K, T, H).sum(2) for d in (dk, dv))]


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", RECIPES)
def test_narrow_attention_is_that_of_the_oracle(name):
    casts, mask = casts_of(name), None if "scale" in name else documents()
    q, k, v, dy = tensors()
    # Where factors have more than a few bits, sums are not exact in float64: there the order decides.
    exact = all(cast.is_scaled and (cast.block is None or cast.scale != "fp32") for cast in casts.values())
    got = computed(q, k, v, dy, mask, AttentionContext(casts, keys=KEYS, first_sample=FIRST))
    for ours, expected in zip(got, ByHand(casts)(q, k, v, dy, mask), strict=True):
        if exact:
            assert (ours.numpy() != expected).sum() == 0
        else:
            torch.testing.assert_close(ours, torch.tensor(expected), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("heads", [1, 2])
def test_pieces_change_no_number(monkeypatch, name, heads):
    context = AttentionContext(casts_of(name), keys=KEYS, first_sample=FIRST)
    whole = computed(*tensors(torch.bfloat16), documents(), context)
    monkeypatch.setitem(places.SCORES, "cpu", heads * T * T)
    pieces = computed(*tensors(torch.bfloat16), documents(), context)
    assert torch.equal(pieces[0], whole[0])
    assert torch.equal(pieces[1], whole[1])
    for got, expected in zip(pieces[2:], whole[2:], strict=True):  # sums over T in two parts
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-6)


def test_a_foreign_model_is_told_that_its_attention_is_out_of_reach():
    encoder = torch.nn.TransformerEncoderLayer(16, 2)
    for narrow, thing in (({"attention.p": "e4m3"}, "attention"), ({"stream": "bf16"}, "residual stream")):
        recipe = ng.recipe("fp8").with_places(narrow)
        with pytest.raises(UserError, match=rf"{thing}.*where no recipe reaches it.*with_places") as error:
            ng.convert(encoder, recipe)
        assert type(encoder.linear1) is torch.nn.Linear, error
    ng.convert(encoder, ng.recipe("fp8").with_places({"attention.p": "bf16"}))
