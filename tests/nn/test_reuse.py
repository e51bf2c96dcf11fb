"""Operands that are used again: by a place that takes the numbers of another one, as they are or rounded once
more; in the backward pass, kept in their bits; on the way between processes. And places that cannot."""

import pytest
import torch

from narrowgauge.nn import Linear, set_step
from narrowgauge.nn.weight import WeightGather
from narrowgauge.quantization import (
    DEFAULT_CONTEXT,
    TensorShard,
    cast,
    full_axis,
    make_cast,
    quantize,
    quantize_in_context,
)
from narrowgauge.recipes import parse_recipe, recipe

M, K, N = 64, 96, 32
DEQUANTIZED = 'compute = "fp32"\nfprop = "mxfp4"\ndgrad.w = "fprop.w"\nwgrad.x = "fprop.x"\n'


def run(r, w=None, x=None, dtype=torch.float32, **places):
    """(y, dx, dw, x, w, dy) of a layer under a recipe, and the bytes kept of its input."""
    g = torch.Generator().manual_seed(0)
    own_w, own_x, dy = (torch.randn(*shape, generator=g) for shape in ((N, K), (M, K), (M, N)))
    layer = torch.nn.Linear(K, N, bias=False)
    layer.weight.data = own_w if w is None else w
    x, dy = (own_x if x is None else x).to(dtype).requires_grad_(), dy.to(dtype)
    layer = Linear(layer, (parse_recipe(r, "mine") if "\n" in r else recipe(r)).with_places(places), 0)
    set_step(layer, 1, 2, 0)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    y.backward(dy)
    found = y.detach(), x.grad, layer.weight.grad, x.detach(), layer.weight.detach(), dy
    return found, sum(t.numel() * t.element_size() for t in kept if t.ndim == 0 or t.shape[0] == M)


def seen(x, cast, axis=-1, **options):
    return quantize(x, make_cast(cast), axis, **options).dequantize()


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_products_of_the_numbers_that_the_forward_pass_saw():
    y, dx, dw, x, w, dy = run(DEQUANTIZED)[0]
    x, w = seen(x, "mxfp4"), seen(w, "mxfp4")
    close((y, dx, dw), (x @ w.T, dy @ w, dy.T @ x))


def test_random_numbers_are_drawn_once():
    """With identities for the other operand, matmuls show what they saw."""
    text = 'compute = "fp32"\nfprop.x = {cast = "mxfp4", rounding = "stochastic"}\nwgrad.x = "fprop.x"'
    x, layer = torch.randn(M, K), torch.nn.Linear(K, K, bias=False)
    layer.weight.data = torch.eye(K)
    layer = Linear(layer, parse_recipe(text, "mine"), 0)
    set_step(layer, 1, 2, 0)
    y = layer(x)
    y.backward(torch.eye(M, K))
    assert torch.equal(layer.weight.grad[:M], y.detach())
    assert not torch.equal(y.detach(), seen(x, "mxfp4"))


@pytest.mark.parametrize("fprop", ["nvfp4", "e4m3", "fp8-1x128", {"cast": "nvfp4", "tensor_scale": "row"}])
def test_codes_that_are_kept_are_the_same_numbers(fprop):
    places = {"fprop.x": fprop, "fprop.w": fprop}
    wide, narrow = (run(DEQUANTIZED, **places, saved=saved)[0] for saved in ("input", "operand"))
    assert all(torch.equal(a, b) for a, b in zip(wide[:3], narrow[:3], strict=True))


BF16 = {"dtype": torch.bfloat16}


@pytest.mark.parametrize("name", ["fp8", "fp8-delayed"])
def test_an_operand_of_one_scale_costs_a_byte_and_changes_nothing(name):
    (wide, wide_bytes), (narrow, narrow_bytes) = (run(name, **BF16, saved=s) for s in ("input", "operand"))
    assert all(torch.equal(a, b) for a, b in zip(wide[1:3], narrow[1:3], strict=True))
    assert narrow_bytes <= M * K + 16 < 2 * M * K <= wide_bytes


@pytest.mark.parametrize(("name", "bits"), [("mxfp8", 8), ("mxfp4", 4), ("nvfp4", 4), ("mxfp6-e2m3", 6)])
def test_a_block_operand_is_kept_in_its_bits(name, bits):
    (_, _, dw, x, w, _), kept = run(name, **BF16, saved="operand")
    c = recipe(name).casts["fprop.x"]
    assert kept <= M * K * bits / 8 + 4 * M * K / c.block[1] + 16
    assert torch.equal(dw, run(name, **BF16, w=w, x=seen(x, c), saved="input")[0][2])


def test_the_input_is_kept_in_another_cast_or_rounded():
    (_, dx, dw, x, _, dy), kept = run("bf16", **BF16, saved="mxfp8")
    plain = run("bf16", **BF16)[0]
    assert kept < 1.2 * M * K
    assert torch.equal(dx, plain[1])
    assert not torch.equal(dw, plain[2])
    torch.testing.assert_close(dw, dy.float().T @ seen(x.float(), "mxfp8"), rtol=2**-7, atol=1e-4)
    _, _, dw, x, _, dy = run("fp32", saved="bf16")[0]
    torch.testing.assert_close(dw, dy.T @ x.bfloat16().float(), rtol=1e-4, atol=1e-4)


class OneProcess:
    """The mesh of a weight whose only shard is the weight."""

    def size(self):
        return 1


def test_a_shard_is_quantized_once_until_its_weight_changes():
    shard, fp8 = torch.randn(8, 16), cast("e4m3")
    gather, sent = WeightGather(fp8, shard, None, TensorShard(tuple(full_axis(n) for n in shard.shape))), []
    for factor in (1, 1, -3):
        if factor != 1:
            with torch.no_grad():
                shard[0] *= factor
        (codes,), (scale, _) = gather.fsdp_pre_all_gather(OneProcess(), shard.shape, None, None, None)
        expected = quantize_in_context(shard, fp8, -1, DEFAULT_CONTEXT)
        assert torch.equal(codes, expected.codes)
        assert torch.equal(scale, expected.scales)
        sent.append(codes)
    assert sent[1] is sent[0], "the backward pass gathers what the forward pass did"
    assert not torch.equal(sent[2], sent[0])
