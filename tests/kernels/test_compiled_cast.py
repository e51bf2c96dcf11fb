"""Casts as operators of a compiled graph: the numbers of the eager ones, bit for bit."""

import shutil

import pytest
import torch

from narrowgauge.formats import RandomStream, random_stream
from narrowgauge.kernels import compile_casts, compiled_cast
from narrowgauge.nn import convert, set_step
from narrowgauge.quantization import QuantContext, emulate, make_cast

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own tracing
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor's CPU code needs g++")


@pytest.fixture(autouse=True)
def _operators():
    torch._dynamo.reset()
    compile_casts(True)
    yield
    compile_casts(False)
    compiled_cast._compiled.cache_clear()


def make(name):
    torch.manual_seed(0)
    return convert(torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.Linear(64, 24)), name)


def outcomes(model, run):
    """Loss and gradients of two steps."""
    results = []
    for step in range(2):
        set_step(model, 1, step, 4 * step)
        x = torch.randn(3, 21, 40, generator=torch.Generator().manual_seed(step)).requires_grad_()
        model.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        results += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    return results


@pytest.mark.parametrize("name", ["fp8-delayed", "fp4", "nvfp4", "quartet", "nvfp4-row", "averis"])
def test_a_graph_of_operators_gives_the_eager_numbers(name, monkeypatch):
    """Every form that an operator's results take; the casts themselves are not compiled here."""
    names = []
    monkeypatch.setattr(compiled_cast, "_compiled", compiled_cast.cast_function)
    form = compiled_cast._form
    monkeypatch.setattr(compiled_cast, "_form", lambda c, dtype: (names.append(c.name), form(c, dtype))[1])
    eager, model = make(name), make(name)
    expected = outcomes(eager, eager)
    got = outcomes(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert names
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@needs_compiler
@pytest.mark.parametrize(
    "keys",
    [
        {"cast": "nvfp4", "rounding": "stochastic"},
        pytest.param({"cast": "mxfp8"}, marks=pytest.mark.slow),
        pytest.param({"cast": "nvfp4", "candidates": [6, 4], "choose": "mse"}, marks=pytest.mark.slow),
        pytest.param({"cast": "e4m3"}, marks=pytest.mark.slow),
        pytest.param({"cast": "fp4-row"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("axis", [-1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_compiled_cast_gives_the_eager_bits_for_any_shape(keys, axis):
    cast, stream, offset = make_cast(keys), random_stream(1, 2, 3), torch.tensor(5 * 2**32 - 300)
    run = compiled_cast._compiled(cast, axis, torch.bfloat16)
    for shape in ((64, 48), (96, 160)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        x[0, :20], x[1, 0], x[40, 33] = 0, float("nan"), -1e30
        context = QuantContext(RandomStream(stream.key, offset))
        expected, got = (
            emulate(x, cast, axis, torch.bfloat16, context),
            run(x, stream.key, offset, None, None),
        )
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
