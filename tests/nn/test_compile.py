"""torch.compile of converted layers: whole graphs, and which of their numbers are the eager ones.

Traced and differentiated but run by torch's own kernels ("aot_eager"), everything is the same bit for bit.
Inductor's code is bit-identical for a layer as well: casts, matmuls, biases and sums for their gradients are
operators. It sums the gradients of norms in another order. What lies between layers has bf16's roundings
where it is compiled as `training.compile` does (`compiled_as_eager`).
"""

import shutil

import pytest
import torch

from narrowgauge.models import ModelConfig, Transformer, initialize
from narrowgauge.nn import convert, set_step
from narrowgauge.nn.gemm import plain_mm
from narrowgauge.quantization import cast, emulate, gradient_of
from narrowgauge.recipes import recipe
from narrowgauge.torch_compat import compiled_as_eager
from nn.plain_recipes import PLAIN

# All come from torch's own tracing and compiling.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
KINDS = {
    "gpt2": {"norm": "layer", "mlp": "gelu", "bias": True, "positions": "learned"},
    "llama": {"norm": "rms", "mlp": "swiglu", "bias": False, "kv_heads": 2},
}
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


@pytest.mark.tier("thorough")  # compiles for seconds; the test of inductor's layers keeps some
@pytest.mark.parametrize("name", PLAIN)
def test_a_traced_model_is_the_eager_one_bit_for_bit(name):
    eager, model = make(name), make(name)
    expected = outcomes(eager, eager)
    got = outcomes(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.tier("thorough")  # compiles for seconds
def test_random_bits_go_on_without_compiling_anew():
    eager, model = make("nvfp4"), make("nvfp4")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            expected, got = gradients(eager, eager, 0), gradients(model, compiled, 0)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


NARROW = {"attention": {"cast": "mxfp8", "block": 8, "rounding": "stochastic"}, "stream": "mxfp8"}


@pytest.mark.tier("thorough")  # compiles for seconds
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


def differences(expected, got):
    """The norm of what differs, in units of the expected one, for each name that differs at all."""
    apart = {name: (got[name].float() - t.float()).norm() / t.float().norm() for name, t in expected.items()}
    return {name: value.item() for name, value in apart.items() if value != 0}


# Six steps of a model under each recipe: training/step/test_compile.py.
@pytest.mark.tier("thorough")
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"])
def test_inductors_layers_are_the_eager_ones_bit_for_bit(name, dtype):
    """A bias is added to a rounded product, and its gradient is a sum; inductor would change both."""

    def outcome(compiled):
        torch.manual_seed(0)
        layers = torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 24), torch.nn.Linear(24, 8)
        model = convert(torch.nn.Sequential(*layers), name)
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(3, 171, 40, generator=generator).to(dtype).requires_grad_()
        dy = torch.randn(3, 171, 8, generator=generator).to(dtype)
        set_step(model, 1, 3, 4, 10, 8)
        y = (torch.compile(model) if compiled else model)(x)
        y.backward(dy)
        return {"y": y.detach(), "dx": x.grad} | {n: gradient_of(p) for n, p in model.named_parameters()}

    assert not differences(outcome(compiled=False), outcome(compiled=True))


@pytest.mark.tier("thorough")
@needs_compiler
@pytest.mark.parametrize("columns", [40, 48, 64])
def test_a_traced_cast_of_a_padded_block_has_the_bits_of_the_eager_one(columns):
    """Inductor's loop over the last, padded block of 32 otherwise leaves its elements uninitialized."""
    x = torch.randn(63, columns, generator=torch.Generator().manual_seed(0))

    def product(x):
        operand, _ = emulate(x, cast("mxfp8"), -1, torch.bfloat16)
        return plain_mm(operand, torch.eye(columns, dtype=torch.bfloat16), torch.bfloat16)

    assert torch.equal(torch.compile(product)(x), product(x))


@pytest.mark.tier("thorough")  # compiles for seconds
@needs_compiler
@pytest.mark.parametrize(
    ("name", "kind"),
    [("fp8", "gpt2"), ("mxfp4", "gpt2"), ("nvfp4", "llama")],
)
def test_a_model_is_compiled_with_the_roundings_of_the_eager_one(name, kind):
    """Each layer has the bits of the eager gradients, though casts to four bits make steps of differences."""
    shape = {"dim": 64, "layers": 2, "heads": 4, "ffn_dim": 128, "vocab_size": 67, "max_sequence_length": 32}
    ids = torch.randint(0, 67, (2, 32), generator=torch.Generator().manual_seed(0))

    def outcome(compile_it):
        model = Transformer(ModelConfig(**shape, **KINDS[kind]), torch.bfloat16)
        initialize(model, 0)
        convert(model, name)
        set_step(model, 1, 1, 0, 10)
        loss = compile_it(model.loss)(ids, ids.roll(-1, 1))
        loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if "norm" not in n}

    found = differences(outcome(lambda loss: loss), outcome(compiled_as_eager))
    assert found.keys() <= {"embedding.weight", "position_embedding.weight"}  # sums over tokens
    assert all(value < 1e-6 for value in found.values())
