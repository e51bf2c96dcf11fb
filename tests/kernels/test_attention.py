"""Attention on a CPU in C: the bits of its twin, the same for any cut; and which of torch's are allowed."""

import pytest
import torch

from kernels.common import INF, NAN, assert_same, assert_same_for_threads, needs_c, of_traced_code
from narrowgauge.kernels import attention_in_order as way
from narrowgauge.kernels import choose_attention
from narrowgauge.kernels.attention import attend
from narrowgauge.kernels.dispatch import attention_backends

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
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


def outcomes(*shapes, size=1.0):
    """y, its row statistics and the gradients of q, k and v, of each shape."""
    found = []
    for shape in shapes:
        q, k, v, grad = operands(*shape, size=size)
        y, stats = way.forward(q, k, v)
        found += [y, stats, *way.backward(q, k, v, y, stats, grad)]
    return found


@needs_c
@pytest.mark.parametrize("size", [1.0, 6.0])
def test_attention_in_c_gives_the_bits_of_the_twin(size, monkeypatch):
    found = outcomes(*SHAPES, size=size)
    monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")
    assert not way.has_c()
    assert_same(found, outcomes(*SHAPES, size=size))


@needs_c
def test_threads_and_batches_change_nothing(monkeypatch):
    shape = (4, 4, 2, 37, 32)
    assert_same_for_threads(lambda: outcomes(shape), monkeypatch)
    q, k, v, _ = operands(*shape)
    assert torch.equal(way.forward(q[1:2], k[1:2], v[1:2])[0], outcomes(shape)[0][1:2])


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
    for changes, bad in [(q, NAN), (q, INF), (k, NAN), (v, INF)]:
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
    assert not way.supports(q, k, v, mask)
    assert attend(q, k, v, mask).shape == q.shape


@needs_c
@of_traced_code
def test_a_compiled_graph_has_the_same_bits(in_order):
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for chosen in ("in-order", "torch"):  # the second choice makes other code
        choose_attention(chosen)
        assert_same(*(gradients(f, *operands(2, 4, 2, 37, 32)) for f in (attend, compiled)))


def allowed():
    """The backends of torch's attention that are enabled now."""
    names = "cudnn", "flash", "mem_efficient", "math"
    return {name for name in names if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()}


@pytest.mark.parametrize(
    ("device", "has_mask", "strict"), [(GPU, 0, 0), (GPU, 1, 0), (GPU, 0, 1), (CPU, 1, 0)]
)
def test_torch_keeps_its_attentions_without_cudnn_where_it_is_unfit(device, has_mask, strict):
    """With a mask on a GPU, and under strict determinism, where it adds in any order."""
    has_cudnn = device == CPU or not (has_mask or strict)
    torch.use_deterministic_algorithms(bool(strict))
    try:
        with attention_backends(device, bool(has_mask)):
            assert allowed() == {"flash", "mem_efficient", "math"} | ({"cudnn"} if has_cudnn else set())
    finally:
        torch.use_deterministic_algorithms(False)
