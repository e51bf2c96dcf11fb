"""torch.compile of converted layers: whole graphs, and which of their numbers are the eager ones.

Traced and differentiated but run by torch's own kernels ("aot_eager"), everything is the same bit for bit.
Inductor's code is bit-identical as well: training/step/test_compile.py, for whole models.
"""

import shutil

import pytest
import torch
from torch import nn

from narrowgauge.nn import convert, recipe_tensors, set_step
from narrowgauge.nn.gemm import plain_mm
from narrowgauge.quantization import cast, emulate
from nn.layers import PLAIN
from nn.own_loop import NARROW as NARROW_STATE
from nn.own_loop import WIDE, assert_same, model, train

pytestmark = [  # all come from torch's own tracing and compiling
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.tier("thorough"),  # compiles for seconds
]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor's CPU code needs g++")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def make(under):
    """Layers with and without a bias."""
    torch.manual_seed(0)
    layers = nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 24, bias=False)
    return convert(nn.Sequential(*layers), under)


def assert_traced_is_eager(eager, traced, run):
    """Losses, gradients and the memory of steps; only the first of them is traced."""
    for number in range(3):
        x = (number + 1) * torch.randn(3, 21, 40, generator=torch.Generator().manual_seed(number))
        found = []
        for m, call in ((eager, eager), (traced, run)):
            m.zero_grad()
            set_step(m, 1, number, 4 * number)
            leaf = x.clone().requires_grad_()
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                loss = call(leaf).square().mean()
            loss.backward()
            memory = [t.clone() for t in recipe_tensors(m).values()]
            found.append([loss.detach(), leaf.grad, *(p.grad for p in m.parameters()), *memory])
        assert all(map(torch.equal, *found))


#: One recipe for each way of casting that a compiler has to follow: none, one scale a tensor that is
#: remembered, outliers apart, blocks under two scales with random bits, an estimator.
TRACED = ("bf16", "fp8-delayed", "fp4", "nvfp4", "quartet")


@pytest.mark.tier("nightly", keep=TRACED)
@pytest.mark.parametrize("name", PLAIN)
def test_a_traced_model_is_the_eager_one_bit_for_bit(name):
    traced = make(name)
    assert_traced_is_eager(make(name), traced, torch.compile(traced, fullgraph=True, backend="aot_eager"))


@pytest.mark.tier("nightly", keep=("nvfp4", "msamp-o3"))
@pytest.mark.parametrize("name", [*WIDE, *NARROW_STATE])
def test_a_compiled_model_trains_as_the_eager_one(name):
    """One graph, or one that breaks at each layer whose gradient is written on the side."""
    m, eager = model(name), model(name)
    compiled = torch.compile(m, fullgraph=name in WIDE, backend="aot_eager")
    assert_same(train(m, name, compiled, (1, 2)), train(eager, name, numbers=(1, 2)))


@needs_compiler
@pytest.mark.parametrize("columns", [40, pytest.param(48, marks=pytest.mark.tier("nightly"))])
def test_a_traced_cast_of_a_padded_block_has_the_bits_of_the_eager_one(columns):
    """Inductor's loop over the last, padded block of 32 otherwise leaves its elements uninitialized."""
    x = torch.randn(63, columns, generator=torch.Generator().manual_seed(0))

    def product(x):
        operand, _ = emulate(x, cast("mxfp8"), -1, torch.bfloat16)
        return plain_mm(operand, torch.eye(columns, dtype=torch.bfloat16), torch.bfloat16)

    assert torch.equal(torch.compile(product)(x), product(x))
