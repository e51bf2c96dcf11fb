"""torch.compile of converted layers: whole graphs, and which of their numbers are the eager ones.

Traced and differentiated but run by torch's own kernels ("aot_eager"), everything is the same bit for bit.
Inductor's code is so, too, for a layer without a bias; with one it skips a rounding to bf16 between product
and bias where the layer's input is fp32, and sums the bias gradient in another order.
"""

import shutil

import pytest
import torch

from narrowgauge.models import ModelConfig, Transformer, initialize
from narrowgauge.nn import Linear, convert, set_step
from narrowgauge.recipes import recipe
from nn.plain_recipes import PLAIN
from support.quick import quick

# All come from torch's own tracing and compiling.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor's CPU code needs g++")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def make(name):
    torch.manual_seed(0)
    return convert(
        torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.GELU(), torch.nn.Linear(64, 24, bias=False)),
        name,
    )


def outcomes(model, run, steps=2):
    """Loss and gradients of some steps."""
    results = []
    for step in range(steps):
        set_step(model, 1, step, 4 * step)
        results += gradients(model, run, step)
    return results


def gradients(model, run, seed):
    x = torch.randn(3, 21, 40, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    model.zero_grad()
    loss = run(x).square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("name", quick(PLAIN, "fp32", "bf16", "mxfp4", "fp8"))
def test_a_traced_model_is_the_eager_one_bit_for_bit(name):
    eager, model = make(name), make(name)
    expected = outcomes(eager, eager)
    got = outcomes(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_random_bits_go_on_without_compiling_anew():
    eager, model = make("nvfp4"), make("nvfp4")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            expected, got = gradients(eager, eager, 0), gradients(model, compiled, 0)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


NARROW = {"attention": {"cast": "mxfp8", "block": 8, "rounding": "stochastic"}, "stream": "mxfp8"}


@pytest.mark.parametrize("recompute", [0, 1])
def test_a_traced_model_with_narrow_attention_trains_as_the_eager_one(recompute):
    """Graphs end at attention, which runs as ever; a gradient of two graphs is summed in another order."""
    shape = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 67}
    model = Transformer(ModelConfig(**shape, max_sequence_length=32), torch.float32)
    initialize(model, 0)
    convert(model, recipe("fp8-attention").with_places(NARROW))
    model.recompute = recompute
    ids = torch.randint(0, 67, (2, 32), generator=torch.Generator().manual_seed(0))
    digits = []
    for loss_of in (model.loss, torch.compile(model.loss, backend="aot_eager")):
        for step in range(2):
            set_step(model, 0, step, 0)
            model.zero_grad()
            loss = loss_of(ids, ids.roll(-1, 1))
            loss.backward()
            digits.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for step in range(2):
        assert torch.equal(digits[2 + step][0], digits[step][0])
        for got, expected in zip(digits[2 + step], digits[step], strict=True):
            assert (got - expected).norm() <= 1e-6 * expected.norm()
    assert digits[0][0] != digits[1][0], "each step draws other bits"


@needs_compiler
@pytest.mark.parametrize("name", ["fp8", pytest.param("mxfp4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_inductors_layer(name, bias):
    torch.manual_seed(0)
    layer = Linear(torch.nn.Linear(40, 24, bias=bias), recipe(name), 0)
    dy = torch.randn(3, 21, 24)

    def outcome(run):
        x = torch.randn(3, 21, 40, generator=torch.Generator().manual_seed(2)).requires_grad_()
        layer.zero_grad()
        y = run(x)
        y.backward(dy)
        return {"y": y.detach(), "dx": x.grad} | {n: p.grad.clone() for n, p in layer.named_parameters()}

    expected, got = outcome(layer), outcome(torch.compile(layer, fullgraph=True))
    assert all(torch.equal(got[n], expected[n]) for n in ("dx", "weight"))
    if bias:
        torch.testing.assert_close(got["y"], expected["y"], rtol=2**-7, atol=2**-9)
        torch.testing.assert_close(got["bias"], expected["bias"], rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(got["y"], expected["y"])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8", "mxfp4", "nvfp4"])
def test_inductors_model_is_as_close_as_its_format_allows(name):
    """A last bit that differs before a rounding can move an element by a whole step of the narrow grid."""
    eager, model = make(name), make(name)
    expected, got = outcomes(eager, eager), outcomes(model, torch.compile(model, fullgraph=True))
    allowed = {"fp32": 1e-5, "bf16": 0.02, "fp8": 0.1}.get(name, 0.2)
    assert all((a - b).norm() <= allowed * b.norm() for a, b in zip(got, expected, strict=True))
