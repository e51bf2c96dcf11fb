"""What is kept for the backward pass: its bytes, what it changes, and that it is freed."""

import gc
import weakref

import pytest
import torch

from narrowgauge.formats import random_stream
from narrowgauge.nn import Linear
from narrowgauge.nn.step_state import stream_ids
from narrowgauge.quantization import make_cast, quantize
from narrowgauge.recipes import recipe

M, K, N = 64, 96, 32


def run(r, bias=False):
    """Gradients of a layer, and the bytes kept of its input (everything but weights)."""
    torch.manual_seed(0)
    layer = Linear(torch.nn.Linear(K, N, bias=bias), r, 0)
    layer.set_position(1, 2, 0)
    x, dy = torch.randn(M, K).bfloat16().requires_grad_(), torch.randn(M, N).bfloat16()
    kept = []

    def keep(t):
        if t.ndim == 0 or t.shape[0] == M:
            kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = layer(x)
    y.backward(dy)
    return x, dy, x.grad, layer.weight.grad, sum(t.numel() * t.element_size() for t in kept)


@pytest.mark.parametrize("name", ["fp8", "fp8-delayed"])
def test_an_operand_of_one_scale_costs_a_byte_and_changes_nothing(name):
    wide, narrow = (run(recipe(name).with_places({"saved": saved})) for saved in ("input", "operand"))
    assert torch.equal(wide[2], narrow[2])
    assert torch.equal(wide[3], narrow[3])
    assert narrow[4] <= M * K + 16 < 2 * M * K <= wide[4]


@pytest.mark.parametrize(("name", "bits"), [("mxfp8", 8), ("mxfp4", 4), ("nvfp4", 4), ("mxfp6-e2m3", 6)])
def test_a_block_operand_is_kept_in_its_bits(name, bits):
    r = recipe(name).with_places({"saved": "operand"})
    x, dy, _, dw, kept = run(r)
    block = r.casts["fprop.x"].block[1]
    assert kept <= M * K * bits / 8 + 4 * M * K / block + 16
    assert torch.equal(dw, by_hand(r, quantize(x, r.casts["fprop.x"]).dequantize(torch.bfloat16), dy))


def by_hand(r, x, dy):
    """The weight gradient if the input had been `x`."""
    torch.manual_seed(0)
    layer = Linear(torch.nn.Linear(K, N, bias=False), r.with_places({"saved": "input"}), 0)
    layer.set_position(1, 2, 0)
    layer(x.detach()).backward(dy)
    return layer.weight.grad


def test_an_operand_is_kept_with_the_random_bits_that_the_product_saw():
    table = {"cast": "mxfp4", "rounding": "stochastic"}
    x, dy, _, dw, _ = run(recipe("mxfp4").with_places({"saved": "operand", "fprop.x": table}))
    stream = random_stream(1, 2, stream_ids(0)[0])  # of seed 1, step 2 and fprop.x, as in `run`
    seen = quantize(x, table, generator=stream).dequantize(torch.bfloat16)
    assert not torch.equal(seen, quantize(x, "mxfp4").dequantize(torch.bfloat16))
    assert torch.equal(dw, by_hand(recipe("mxfp4"), seen, dy))


def test_another_cast():
    r = recipe("bf16").with_places({"saved": "mxfp8"})
    x, dy, dx, dw, kept = run(r)
    assert kept < 1.2 * M * K
    stored = quantize(x, make_cast("mxfp8")).dequantize(torch.bfloat16)
    assert torch.equal(dx, run(recipe("bf16"))[2])
    assert not torch.equal(dw, run(recipe("bf16"))[3])
    torch.testing.assert_close(dw, (dy.float().T @ stored.float()), rtol=2**-7, atol=1e-4)


def test_a_wide_cast_rounds():
    x, dy = torch.randn(M, K), torch.randn(M, N)
    layer = Linear(torch.nn.Linear(K, N, bias=False), recipe("fp32").with_places({"saved": "bf16"}), 0)
    layer(x.requires_grad_()).backward(dy)
    torch.testing.assert_close(layer.weight.grad, dy.T @ x.detach().bfloat16().float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_it_is_freed_after_the_backward_pass(name):
    layer = Linear(torch.nn.Linear(K, N), recipe(name).with_places({"saved": "operand"}), 0)
    refs = []

    def keep(t):
        refs.append(weakref.ref(t))
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = layer(torch.randn(M, K, requires_grad=True))
    y.sum().backward()
    del y
    gc.collect()
    owned = {id(p) for p in layer.parameters()}
    assert refs
    assert all(r() is None or id(r()) in owned or r()._base is layer.weight for r in refs)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fp8", "mxfp4", "nvfp4"])
def test_what_is_not_finite_stays_so(name, poison):
    layer = Linear(torch.nn.Linear(K, N), recipe(name).with_places({"saved": "operand"}), 0)
    x = torch.randn(M, K)
    x[3, 5] = poison
    layer(x).sum().backward()
    assert not layer.weight.grad[:, 5].isfinite().any()
