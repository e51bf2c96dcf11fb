"""Casts as operators of a compiled graph: the numbers of the eager ones, and small graphs."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from narrowgauge.kernels import cast
from narrowgauge.nn import convert, set_step
from narrowgauge.quantization.passes import build

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own tracing
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function"),
    pytest.mark.skipif(not build.compiler(), reason="there is no C compiler"),
]
# Every form that an operator's results take: a scale of the tensor or none, wide numbers, a longer axis.
FORMS = ["fp8-delayed", "fp4", "nvfp4", "quartet2", "nvfp4-row", "averis", "tetrajet2"]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def make(name):
    torch.manual_seed(0)
    return convert(torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.Linear(64, 48)), name)


def outcomes(model, run):
    """Losses and gradients of two steps; the second has another number of tokens."""
    results = []
    for step, tokens in enumerate((21, 32)):
        set_step(model, 1, step, 4 * step)
        x = torch.randn(3, tokens, 40, generator=torch.Generator().manual_seed(step)).requires_grad_()
        model.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        results += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    return results


@pytest.mark.tier("nightly", keep=2)
@pytest.mark.tier("thorough")  # nn/test_compile.py compares fp8 and mxfp4, whose casts are operators there
@pytest.mark.parametrize("name", FORMS)
def test_a_graph_of_operators_gives_the_eager_numbers(name, monkeypatch):
    monkeypatch.setattr(cast, "_casts", {})
    eager, model = make(name), make(name)
    expected = outcomes(eager, eager)
    got = outcomes(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert cast._casts  # the operator was traced
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.tier("thorough")  # the test above runs this graph; here its size is bounded
def test_no_cast_is_unrolled_in_a_graph():
    """The forward graph; its size decides how long torch compiles."""
    sizes = {}
    for name in ("mxfp4", "nvfp4-4over6"):

        def count(graph, _, name=name):
            sizes[name] = len(graph.graph.nodes)
            return graph.forward

        torch._dynamo.reset()
        model = make(name)
        set_step(model, 1, 0, 0)
        backend = aot_autograd(fw_compiler=count)
        torch.compile(model, fullgraph=True, backend=backend)(torch.randn(32, 40, requires_grad=True))
    assert max(sizes.values()) < 60  # traced, one of its four casts has as many nodes
