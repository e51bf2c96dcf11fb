"""Each recipe that ships, through what a training loop does to a layer: views, autocast, empty batches,
frozen weights and copies change nothing."""

import copy

import pytest
import torch

from narrowgauge.nn import Linear, set_step
from narrowgauge.recipes import recipe
from nn.plain_recipes import PLAIN

K, N = 128, 256


def make(name, bias=True):
    torch.manual_seed(0)
    # outside a model there is nothing to keep wide
    layer = Linear(torch.nn.Linear(K, N, bias=bias), recipe(name).for_layer([("up", None)], 0), 0)
    layer.set_position(0, 1, 0)
    return layer


def tensors(shape=(4, 32), dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, K, generator=g).to(dtype).requires_grad_()
    return x, torch.randn(*shape, N, generator=g).to(dtype)


def products(layer, run, x, dy):
    layer.zero_grad()
    x.grad = None
    y = run(x)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad]


def decibels(got, exact):
    return (20 * torch.log10(exact.norm() / (exact - got.double()).norm())).item()


def warmed(layer, x, dy):
    """A history has to see a step before its scales mean something."""
    products(layer, layer, x, dy)
    layer.set_position(0, 2, 0)
    return layer


@pytest.mark.parametrize("name", PLAIN)
def test_views_are_tensors_like_others(name):
    x, dy = tensors((32, 4))
    plain, other = make(name), make(name)
    expected = products(plain, plain, x, dy)
    strided_x = torch.zeros(32, 4, 2 * K)[..., ::2].copy_(x.detach()).requires_grad_()
    strided_dy = dy.transpose(0, 1).contiguous().transpose(0, 1)
    got = products(other, other, strided_x, strided_dy)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", PLAIN)
def test_the_dtype_of_the_input_comes_back(name, dtype):
    x, dy = tensors(dtype=dtype)
    layer = warmed(make(name), x, dy)
    y, dx, _ = products(layer, layer, x, dy)
    assert (y.dtype, dx.dtype) == (dtype, dtype)
    assert decibels(y, x.detach().double() @ layer.weight.detach().double().T + layer.bias.double()) > 12


@pytest.mark.parametrize("name", PLAIN)
def test_no_tokens_no_gradient(name):
    layer = make(name)
    y, dx, dw = products(layer, layer, *tensors((0, 32)))
    assert (y.shape, dx.shape) == ((0, 32, N), (0, 32, K))
    assert torch.equal(dw, torch.zeros(N, K))


@pytest.mark.parametrize("name", PLAIN)
def test_frozen_weights_pass_gradients_on(name):
    x, dy = tensors()
    layer, frozen = make(name), make(name)
    expected = products(layer, layer, x, dy)
    frozen.requires_grad_(False)
    y, dx, dw = products(frozen, frozen, x, dy)
    assert torch.equal(y, expected[0])
    assert torch.equal(dx, expected[1])
    assert dw is None


@pytest.mark.parametrize("name", PLAIN)
def test_autocast_around_it_changes_nothing(name):
    x, dy = tensors()
    plain, other = make(name), make(name)
    expected = products(plain, plain, x, dy)

    def run(t):
        with torch.autocast("cpu", torch.bfloat16):
            return other(t)

    assert all(torch.equal(a, b) for a, b in zip(products(other, run, x, dy), expected, strict=True))


@pytest.mark.parametrize("name", PLAIN)
def test_a_copy_goes_its_own_way_from_the_same_state(name):
    x, dy = tensors()
    layer = warmed(make(name), x, dy)
    twin = copy.deepcopy(layer)
    for m in (layer, twin):
        set_step(m, 0, 3, 0)
    same = zip(products(layer, layer, x, dy), products(twin, twin, x, dy), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert twin.weight is not layer.weight
