"""Attention in C on a CPU: the bits of its twin in torch, close to float64, the same for any cut."""

import subprocess

import pytest
import torch

from narrowgauge.kernels import choose_attention
from narrowgauge.kernels.attention import attend
from narrowgauge.kernels.attention import in_order as way
from narrowgauge.quantization.passes import build, c_call

needs_c = pytest.mark.skipif(not build.compiler(), reason="there is no C compiler")
SHAPES = [(2, 4, 2, 37, 32), (1, 1, 1, 2, 16), (2, 3, 1, 16, 48), (1, 2, 2, 130, 64)]  # B, N, K, T, H


@pytest.fixture
def in_order():
    choose_attention("in-order")
    yield
    choose_attention("")


def operands(B, N, K, T, H, size=1.0):
    g = torch.Generator().manual_seed(T)
    q, k, v, grad = (torch.randn(B, T, n, H, generator=g).mul(size).bfloat16() for n in (N, K, K, N))
    return *(x.transpose(1, 2) for x in (q, k, v)), grad


def outcome(shape, size=1.0):
    """y, its row statistics and the gradients of q, k and v."""
    q, k, v, grad = operands(*shape, size=size)
    y, stats = way.forward(q, k, v)
    return y, stats, *way.backward(q, k, v, y, stats, grad)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@needs_c
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1.0, 6.0])
def test_c_gives_the_bits_of_the_twin(shape, size, monkeypatch):
    found = outcome(shape, size)
    monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")
    assert not way.has_c()
    assert same(found, outcome(shape, size))


@needs_c
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("flags", ["-mno-avx512f -mavx2 -mfma", "-mno-avx -mno-fma"])
def test_other_vector_widths_give_the_same_bits(flags, tmp_path, monkeypatch):
    here = [outcome(shape) for shape in SHAPES]
    probe = tmp_path / "empty.c"
    probe.write_text("")
    known = [*build.compiler(), "-march=native", *flags.split(), "-c", str(probe), "-o", str(tmp_path / "o")]
    if subprocess.run(known, check=False, capture_output=True).returncode:
        pytest.skip("a compiler for another architecture")
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-march=native", *flags.split()))
    monkeypatch.setattr(build, "_FOR_THIS_CPU", ("",))
    library = c_call.c_library.__wrapped__()
    assert library is not None
    monkeypatch.setattr(way, "c_library", lambda: library)
    assert all(same(a, outcome(shape)) for a, shape in zip(here, SHAPES, strict=True))


@needs_c
def test_threads_and_batches_change_nothing(monkeypatch):
    whole = outcome((4, 4, 2, 37, 32))
    monkeypatch.setattr(way, "A_THREAD", 1000)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert same(whole, outcome((4, 4, 2, 37, 32)))
    finally:
        torch.set_num_threads(before)
    q, k, v, _ = operands(4, 4, 2, 37, 32)
    assert torch.equal(way.forward(q[1:2], k[1:2], v[1:2])[0], whole[0][1:2])


def gradients(function, q, k, v, grad):
    """(result, gradients of q, k and v) of causal attention, float64."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    y = function(*leaves)
    y.backward(grad.to(y.dtype).transpose(1, 2))
    return [x.detach().double() for x in (y, *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]])
def test_it_is_as_close_to_float64_as_torchs_kernel(shape, in_order):
    """Both round p, ds and the results to bf16; the quarter is the luck of so few roundings."""
    q, k, v, grad = operands(*shape)
    assert torch.equal(attend(q, k, v), way.attend_in_order(q, k, v))
    found = gradients(attend, q, k, v, grad)
    exact = gradients(attend, q.double(), k.double(), v.double(), grad)
    choose_attention("torch")
    torchs = gradients(attend, q, k, v, grad)
    for ours, theirs, wanted in zip(found, torchs, exact, strict=True):
        assert (ours - wanted).norm() <= 1.25 * (theirs - wanted).norm()


@needs_c
def test_what_is_not_finite_stays_so_and_stays_in_its_head(in_order):
    q, k, v, _ = operands(2, 2, 2, 24, 32)
    for changes, bad in [(q, float("nan")), (q, float("inf")), (k, float("nan")), (v, float("inf"))]:
        changed = changes.clone()
        changed[0, 1, 5, 3] = bad
        y = attend(*(changed if one is changes else one for one in (q, k, v)))
        assert not y[0, 1, 5].isfinite().all()
        assert y[0, 0].isfinite().all()
        assert y[1].isfinite().all()


@pytest.mark.parametrize("why", ["mask", "cache", "fp32", "width"])
def test_what_it_does_not_compute_is_left_to_torch(why, in_order):
    q, k, v, _ = operands(1, 2, 2, 8, 40 if why == "width" else 32)
    mask = torch.ones(8, 8, dtype=torch.bool).tril() if why == "mask" else None
    if why == "cache":
        q = q[:, :, -1:]
    if why == "fp32":
        q, k, v = q.float(), k.float(), v.float()
    assert not way.takes(q, k, v, mask)
    assert attend(q, k, v, mask).shape == q.shape


@needs_c
@pytest.mark.tier("thorough")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
def test_a_compiled_graph_has_the_same_bits(in_order):
    def loss(q, k, v):
        return attend(q, k, v).float().square().sum()

    compiled = torch.compile(loss)
    for chosen in ("in-order", "torch"):  # the second choice makes other code
        choose_attention(chosen)
        found = []
        for function in (loss, compiled):
            leaves = [x.detach().requires_grad_() for x in operands(2, 4, 2, 37, 32)[:3]]
            function(*leaves).backward()
            found.append([x.grad for x in leaves])
        assert same(*found)
