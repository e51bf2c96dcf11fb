"""Each recipe that ships, through everything a training loop does to a layer: how near its products come to
float64's, and that recomputation, compilation, views and empty batches change nothing."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from narrowgauge.nn import Linear, set_step
from narrowgauge.recipes import recipe, recipe_names

K, N = 128, 256
# Signal to noise in dB of (y, dx, dw). torchao asks for 18/17 (fp8), 27/25/24 (mxfp8), 15 (nvfp4); the others
# are half a decibel or more below what was measured.
FLOORS = {
    "fp32": (120, 120, 120),
    "bf16": (45, 45, 45),
    "fp16": (60, 60, 60),
    "fp8": (28, 24, 24),
    "fp8-delayed": (28, 24, 24),
    "fp8-row": (27, 27, 27),
    "fp8-row-hp": (27, 27, 45),
    "fp8-block": (27, 27, 27),
    "mxfp8": (27, 25, 24),
    "mxint8": (38, 38, 38),
    "mxfp6-e2m3": (27, 27, 27),
    "mxfp6-e3m2": (21, 21, 21),
    "mxfp4": (15, 15, 15),
    "nvfp4": (15, 13, 13),
    "fp4": (15, 24, 0),
    "quartet": (15, 12, 12),
}


def make(name, bias=True):
    torch.manual_seed(0)
    # outside of a model there is nothing to keep wide
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


@pytest.mark.parametrize("shape", [(128,), (4, 32), (2, 2, 32)], ids=["2-D", "3-D", "4-D"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", recipe_names())
def test_signal_to_noise(name, bias, shape):
    x, dy = tensors(shape)
    layer = warmed(make(name, bias), x, dy)
    got = products(layer, layer, x, dy)
    w, x64, dy64 = layer.weight.detach().double(), x.detach().double(), dy.double()
    y = x64 @ w.T + (layer.bias.detach().double() if bias else 0)
    dw = dy64.flatten(0, -2).T @ x64.flatten(0, -2)
    measured = [decibels(g, exact) for g, exact in zip(got, (y, dy64 @ w, dw), strict=True)]
    if name == "fp4":  # the estimator is another gradient on purpose
        measured[2] = FLOORS[name][2]
    assert all(m >= floor for m, floor in zip(measured, FLOORS[name], strict=True)), measured


@pytest.mark.parametrize("name", recipe_names())
def test_recomputation_changes_nothing(name):
    x, dy = tensors()
    plain, again = warmed(make(name), x, dy), warmed(make(name), x, dy)
    expected = products(plain, plain, x, dy)
    got = products(again, lambda t: checkpoint(again, t, use_reentrant=False), x, dy)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own tracing
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
@pytest.mark.parametrize("name", recipe_names())
def test_compilation_has_no_graph_break_and_changes_nothing(name):
    """But for delayed scaling, whose histories are written to beside the graph."""
    torch._dynamo.reset()
    x, dy = tensors()
    plain, compiled = make(name), make(name)
    expected = products(plain, plain, x, dy)
    run = torch.compile(compiled, fullgraph=name != "fp8-delayed", backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(products(compiled, run, x, dy), expected, strict=True))


@pytest.mark.parametrize("name", recipe_names())
def test_views_are_tensors_like_others(name):
    x, dy = tensors((32, 4))
    plain, other = make(name), make(name)
    expected = products(plain, plain, x, dy)
    strided_x = torch.zeros(32, 4, 2 * K)[..., ::2].copy_(x.detach()).requires_grad_()
    strided_dy = dy.transpose(0, 1).contiguous().transpose(0, 1)
    got = products(other, other, strided_x, strided_dy)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", recipe_names())
def test_the_dtype_of_the_input_comes_back(name, dtype):
    x, dy = tensors(dtype=dtype)
    layer = warmed(make(name), x, dy)
    y, dx, _ = products(layer, layer, x, dy)
    assert (y.dtype, dx.dtype) == (dtype, dtype)
    assert decibels(y, x.detach().double() @ layer.weight.detach().double().T + layer.bias.double()) > 12


@pytest.mark.parametrize("name", recipe_names())
def test_no_tokens_no_gradient(name):
    layer = make(name)
    y, dx, dw = products(layer, layer, *tensors((0, 32)))
    assert (y.shape, dx.shape) == ((0, 32, N), (0, 32, K))
    assert torch.equal(dw, torch.zeros(N, K))


@pytest.mark.parametrize("name", recipe_names())
def test_frozen_weights_pass_gradients_on(name):
    x, dy = tensors()
    layer, frozen = make(name), make(name)
    expected = products(layer, layer, x, dy)
    frozen.requires_grad_(False)
    y, dx, dw = products(frozen, frozen, x, dy)
    assert torch.equal(y, expected[0])
    assert torch.equal(dx, expected[1])
    assert dw is None


@pytest.mark.parametrize("name", recipe_names())
def test_autocast_around_it_changes_nothing(name):
    x, dy = tensors()
    plain, other = make(name), make(name)
    expected = products(plain, plain, x, dy)

    def run(t):
        with torch.autocast("cpu", torch.bfloat16):
            return other(t)

    assert all(torch.equal(a, b) for a, b in zip(products(other, run, x, dy), expected, strict=True))


@pytest.mark.parametrize("name", recipe_names())
def test_a_copy_goes_its_own_way_from_the_same_state(name):
    x, dy = tensors()
    layer = warmed(make(name), x, dy)
    twin = copy.deepcopy(layer)
    for m in (layer, twin):
        set_step(m, 0, 3, 0)
    same = zip(products(layer, layer, x, dy), products(twin, twin, x, dy), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert twin.weight is not layer.weight
