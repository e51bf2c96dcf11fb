"""Weights, masters and gradients in low precision: bytes, sums over micro-batches, what others see."""

import pytest
import torch

from narrowgauge.nn import Linear, convert
from narrowgauge.optim import AdamW
from narrowgauge.quantization import (
    GradientState,
    QuantizedState,
    gradient_of,
    make_cast,
    plain_gradient,
    state_of,
    stored_tensor,
)
from narrowgauge.recipes import parse_recipe, recipe
from nn.layers import batch, same, transformer

K, N = 96, 64
BYTES = {"bf16": 16, "fp8": 16, "bf16-sr": 12, "msamp-o1": 11, "msamp-o2": 6, "msamp-o3": 7}


def make(name, bias=True):
    torch.manual_seed(0)
    return convert(torch.nn.Linear(K, N, bias=bias), name)


@pytest.mark.parametrize("name", BYTES)
def test_bytes_a_parameter(name):
    """Facts of MS-AMP's table; scales cost less than one percent."""
    layer = make(name, bias=False)
    w, optimizer = layer.weight, AdamW(layer.parameters(), name)
    layer(batch()[0]).sum().backward()
    optimizer.step()
    state = state_of(w)
    tensors = [
        t
        for part in (*state.by_place().values(), *optimizer.moments(w).values())
        for t in part.tensors.values()
    ]
    tensors += [w] * (state.weight is None) + [w.grad] * (state.gradient is None)
    stored = {t.data_ptr(): t.numel() * t.element_size() for t in tensors}
    assert BYTES[name] <= sum(stored.values()) / (K * N) < 1.01 * BYTES[name]


@pytest.mark.parametrize("name", ["bf16-sr", "msamp-o1", "msamp-o2", "msamp-o3", "coat"])
def test_products_see_the_stored_numbers(name):
    layer, (x, dy) = make(name), batch()
    plain = torch.nn.Linear(K, N)
    plain.load_state_dict(layer.state_dict())
    state = dict.fromkeys(("weight", "grad", "m", "v"), "fp32") | {"master": "none"}
    other = Linear(plain, recipe(name).with_places(state), 0)
    results = []
    for each in (layer, other):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        y.backward(dy)
        results.append((y, leaf.grad, each.bias.grad))
    assert same(*results)
    gradient, expected = gradient_of(layer.weight), other.weight.grad
    if name == "coat":
        assert torch.equal(gradient, expected)
        return
    assert plain_gradient(layer.weight) is None
    assert torch.equal(layer.weight.grad, gradient)
    rounded = QuantizedState(expected.shape, state_of(layer.weight).gradient.cast)
    rounded.write(expected)
    step = (rounded.read() - expected).abs().max() * 2
    assert ((gradient - expected).abs() <= expected.abs() * 2.0**-3 + step).all()


@pytest.mark.parametrize("cast", ["e4m3", "e5m2", {"cast": "e4m3", "power_of_two": True}, "bf16", "fp32"])
def test_each_micro_batch_is_added_to_what_was_read_and_rounded_once(cast):
    """MS-AMP's case: ten rounds, bit for bit dequantize, add, quantize."""
    cast = make_cast(cast)
    gradient, oracle = (kind(torch.Size((32, 96)), cast) for kind in (GradientState, QuantizedState))
    for n in range(10):
        x = torch.randn(32, 96, generator=torch.Generator().manual_seed(n))
        gradient.add(x, None)
        oracle.write(oracle.read() + x if n else x)
        assert all(torch.equal(t, oracle.tensors[k]) for k, t in gradient.tensors.items())


def test_what_stays_wide_and_what_has_no_gradient():
    text = recipe("msamp-o2").text.replace('modules = ["head", "lm_head"]', "modules = []")
    model = transformer(parse_recipe(text, "no keep"), name="gpt2-debug")
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.dtype == torch.float32
    assert stored_tensor(model.blocks[0].up.weight).dtype == torch.float16
    model = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.Linear(N, K), torch.nn.Linear(K, N))
    model[0].weight.requires_grad_(False)
    convert(model, "msamp-o3", keep=["1"])
    dtypes = [stored_tensor(layer.weight).dtype for layer in model]
    assert dtypes == [torch.float8_e4m3fn, torch.float32, torch.float8_e4m3fn]
    model(batch()[0]).sum().backward()
    assert [state_of(model[i].weight).gradient.is_empty for i in (0, 2)] == [True, False]
    assert model[0].bias.grad is not None
