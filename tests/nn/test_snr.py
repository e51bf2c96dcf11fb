"""How near a layer's three matmuls come to float64's under each recipe, and that neither recomputation nor
compilation changes them."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from narrowgauge.nn import Linear
from narrowgauge.quantization import estimator_slope
from narrowgauge.recipes import recipe
from nn.plain_recipes import PLAIN

K, N = 128, 256
# Signal to noise in dB of (y, dx, dw), as measured on normal numbers: the lowest with and without a bias.
MEASURED = {
    "fp32": (133.7, 133.8, 133.8),
    "bf16": (49.4, 50.7, 50.9),
    "fp16": (67.4, 68.7, 68.8),
    "fp8": (28.6, 24.7, 24.6),
    "fp8-delayed": (28.6, 24.7, 24.6),
    "coat": (28.6, 24.7, 24.6),
    "fp8-row": (28.4, 28.5, 28.6),
    "fp8-row-hp": (28.4, 28.5, 50.9),
    "fp8-block": (28.4, 28.5, 28.6),
    "fp8-fnuz": (28.7, 24.8, 24.6),
    "mxfp8": (28.4, 28.5, 28.6),
    "mxfp8-2d": (28.4, 28.5, 28.6),
    "bf16-fwd-mxfp8-bwd": (49.5, 28.5, 28.6),
    "mxfp8-fwd-nvfp4-bwd": (28.4, 15.2, 15.6),
    "mxint8": (39.7, 40.0, 38.6),
    "mxfp6-e2m3": (28.0, 28.1, 28.0),
    "mxfp6-e3m2": (22.1, 22.1, 22.6),
    "mxfp4": (15.5, 15.6, 15.7),
    "mxfp4-amd": (15.6, 15.8, 16.1),
    "nvfp4": (16.6, 15.0, 15.5),
    "nvfp4-row": (17.1, 19.8, 20.5),
    "nvfp4-row-fwd-mxfp8-bwd": (17.1, 19.1, 19.9),
    "nvfp4-4over6": (17.5, 15.4, 15.9),
    "fp4-all": (17.0, 15.2, 14.2),
    "averis": (17.0, 15.3, 15.6),
    "fp4-ue5m3": (16.7, 15.0, 15.6),
    "fp4": (16.4, 24.7, 24.9),
    "quartet": (15.6, 12.6, 12.6),
    "quartet2": (18.1, 15.7, 15.7),
    "tetrajet2": (17.1, 13.1, 13.4),
}
BELOW, ABOVE = 0.5, 2.0  # more than ABOVE would be a place that is not narrow
# What torchao requires of its layers, if it does.
TORCHAO = {"fp8": (18, 0, 17), "fp8-row": (18, 0, 17), "mxfp8": (27, 25, 24), "nvfp4": (15, 0, 0)}
# One recipe for each way of casting that a compiler has to follow: none, one scale a tensor, one that is
# remembered, blocks of two dimensions, operands kept narrow, outliers apart, blocks under two scales with
# random bits, and an estimator. mxfp4's are compiled in test_compile.py. The others cast as one of these
# does.
COMPILED = ("bf16", "fp8-delayed", "fp4", "quartet")
RECOMPUTED_IN_COMPILED = (
    "fp8-delayed",
    "nvfp4",
)  # a history, and random bits: what a second pass could change


compiles = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own tracing
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function"),
]


def make(name, bias=True):
    torch.manual_seed(0)
    # outside a model there is nothing to keep wide
    return Linear(torch.nn.Linear(K, N, bias=bias), recipe(name).for_layer([("up", None)], 0), 0)


def tensors(shape=(4, 32)):
    g = torch.Generator().manual_seed(1)
    return torch.randn(*shape, K, generator=g).requires_grad_(), torch.randn(*shape, N, generator=g)


def steps(layer, run, x, dy, count=2):
    """Matmuls and bias gradient of some steps; a history has to see one before its scales mean something."""
    results = []
    for step in range(1, count + 1):
        layer.set_position(0, step, 0)
        layer.zero_grad()
        x.grad = None
        y = run(x)
        y.backward(dy)
        results += [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
    return results


def recomputed(layer):
    return lambda x: checkpoint(layer, x, use_reentrant=False)


def decibels(got, exact):
    return (20 * torch.log10(exact.norm() / (exact - got.double()).norm())).item()


# Each shape, two of them with a bias.
PAIRS = [("bias", "2-D"), ("no-bias", "3-D"), ("bias", "4-D")]


@pytest.mark.tier("thorough", keep=[(name, *rest) for name in PLAIN for rest in PAIRS])
@pytest.mark.parametrize("shape", [(128,), (4, 32), (2, 2, 32)], ids=["2-D", "3-D", "4-D"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("name", PLAIN)
def test_signal_to_noise(name, bias, shape):
    layer = make(name, bias)
    x, dy = tensors(shape)
    y, dx, dw, *db = steps(layer, layer, x, dy)[-4 if bias else -3 :]
    w, x64, dy64 = layer.weight.detach(), x.detach().double(), dy.double()
    exact_y = x64 @ w.double().T + (layer.bias.detach().double() if bias else 0)
    exact_dw = dy64.flatten(0, -2).T @ x64.flatten(0, -2)
    if layer.spec.casts["fprop.w"].estimator.k:  # another gradient on purpose: that of a smooth rounding
        exact_dw = exact_dw * estimator_slope(w, layer.spec.casts["fprop.w"], -1).double()
    pairs = zip((y, dx, dw), (exact_y, dy64 @ w.double(), exact_dw), strict=True)
    got = [decibels(a, b) for a, b in pairs]
    expected = MEASURED[name]
    if name == "fp32":  # the order of its sums is the CPU's own: torch's layer has the same noise there
        plain_x = x.detach().requires_grad_()
        plain_y = torch.nn.functional.linear(plain_x, layer.weight, layer.bias)
        plain = (plain_y.detach(), *torch.autograd.grad(plain_y, (plain_x, layer.weight), dy))
        exact = (exact_y, dy64 @ w.double(), exact_dw)
        expected = tuple(decibels(a, b) for a, b in zip(plain, exact, strict=True))
        assert min(got) > 120, got
    assert all(e - BELOW <= g <= e + ABOVE for g, e in zip(got, expected, strict=True)), got
    assert all(g >= floor for g, floor in zip(got, TORCHAO.get(name, (0, 0, 0)), strict=True)), got
    if bias:  # summed in fp32 from numbers that are not narrow
        assert decibels(db[0], dy64.flatten(0, -2).sum(0)) > 120


@pytest.mark.tier("thorough", keep=(True,))
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("name", PLAIN)
def test_recomputation_changes_nothing(name, bias):
    x, dy = tensors((2, 2, 32))
    plain, again = make(name, bias), make(name, bias)
    expected, got = steps(plain, plain, x, dy), steps(again, recomputed(again), x, dy)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def compiled_case(name, of, bias=True):
    """Steps of compiled code without graph breaks against the same steps uncompiled."""
    torch._dynamo.reset()
    x, dy = tensors()
    plain, layer = make(name, bias), make(name, bias)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = steps(layer, torch.compile(of(layer), fullgraph=True, backend="aot_eager"), x, dy)
    assert all(torch.equal(a, b) for a, b in zip(got, steps(plain, plain, x, dy), strict=True))


class TestCompiled:
    pytestmark = compiles

    @pytest.mark.tier("thorough")  # compiles for seconds; test_compile.py keeps some
    @pytest.mark.parametrize("name", COMPILED)
    def test_there_is_no_graph_break_and_nothing_changes(self, name):
        compiled_case(name, lambda layer: layer)

    @pytest.mark.tier("thorough")  # compiles for seconds; test_compile.py keeps some
    @pytest.mark.parametrize("name", RECOMPUTED_IN_COMPILED)
    def test_recomputation_within_compiled_code(self, name):
        compiled_case(name, recomputed)

    @pytest.mark.tier("thorough")
    @pytest.mark.parametrize("name", COMPILED)
    def test_without_a_bias(self, name):
        compiled_case(name, lambda layer: layer, bias=False)
