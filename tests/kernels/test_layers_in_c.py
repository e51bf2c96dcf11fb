"""Heads and norms in C on a CPU: the bits of torch's plain code, forward and backward."""

import pytest
import torch

from narrowgauge.kernels.heads import rotary, split_heads
from narrowgauge.kernels.norm import add_norm
from narrowgauge.quantization.passes import build

pytestmark = pytest.mark.skipif(not build.compiler(), reason="there is no C compiler")
BF16 = torch.bfloat16
HEADS = [(2, 8, 4, 2, 16, False), (2, 37, 4, 4, 32, False), (3, 9, 2, 1, 64, True), (1, 1, 2, 2, 10, False)]
SIZES = (1.0, 1e-20, 1e18)  # squares that are usual, that vanish, and that overflow


def numbers(generator, *shape):
    return torch.randn(*shape, generator=generator)


def norm_outcome(shape, has_delta, follows_stream, size):
    """The stream, its norm and all gradients; the name of the autograd function."""
    g = torch.Generator().manual_seed(shape[-1])
    x, weight = (numbers(g, *shape) * size).requires_grad_(), numbers(g, shape[-1]).requires_grad_()
    delta = numbers(g, *shape).to(BF16).requires_grad_() if has_delta else None
    s, y, _ = add_norm(x, delta, weight, None, 1e-5, "rms", BF16)
    dy, ds = numbers(g, *shape).to(BF16), numbers(g, *shape)
    torch.autograd.backward((s, y) if follows_stream else (y,), (ds, dy) if follows_stream else (dy,))
    gradients = [t.grad for t in (x, weight, delta) if t is not None]
    return [s.detach(), y.detach(), *gradients], y.grad_fn.name()


def heads_outcome(B, T, N, K, H, has_documents):
    """The heads, split and rotated separately, and their gradients; the name of the autograd function."""
    g = torch.Generator().manual_seed(T)
    table = numbers(g, 2, B, 1, T, H // 2) if has_documents else numbers(g, 2, T, H // 2)
    qkv = numbers(g, B, T, (N + 2 * K) * H).to(BF16).requires_grad_()
    heads = split_heads(qkv, None, table, (N, K, K), H)
    grads = [numbers(g, B, T, x.shape[1], H).to(BF16).transpose(1, 2) for x in heads]
    torch.autograd.backward(heads, grads)
    x = numbers(g, B, T, N, H).to(BF16).requires_grad_()
    turned = rotary(x.transpose(1, 2), table)
    turned.backward(numbers(g, *turned.shape).to(BF16))
    return [*(t.detach() for t in (*heads, turned)), qkv.grad, x.grad], turned.grad_fn.name()


def require_same_bits(outcome, monkeypatch):
    found, name = outcome()
    assert "InC" in name
    monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")
    plain, name = outcome()
    assert "InC" not in name
    for mine, other in zip(found, plain, strict=True):
        kind = torch.int32 if mine.dtype == torch.float32 else torch.int16
        assert torch.equal(mine.isnan(), other.isnan())
        assert torch.equal(mine.nan_to_num().view(kind), other.nan_to_num().view(kind))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("follows_stream", [True, False])
@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("shape", [(2, 8, 32), (3, 5, 96), (1, 7, 257), (4, 33)])
def test_norms_have_torchs_bits(shape, has_delta, follows_stream, size, monkeypatch):
    require_same_bits(lambda: norm_outcome(shape, has_delta, follows_stream, size), monkeypatch)


@pytest.mark.parametrize(
    "shape",
    [(2, 8, 4, 2, 16, False), (2, 37, 4, 4, 32, False), (3, 9, 2, 1, 64, True), (1, 1, 2, 2, 10, False)],
)
def test_heads_have_torchs_bits(shape, monkeypatch):
    require_same_bits(lambda: heads_outcome(*shape), monkeypatch)


def test_threads_change_nothing(monkeypatch):
    one = norm_outcome((16, 64, 128), True, True, 1.0)[0] + heads_outcome(4, 64, 4, 2, 32, False)[0]
    monkeypatch.setattr("narrowgauge.kernels.norm.A_THREAD", 1000)
    monkeypatch.setattr("narrowgauge.kernels.heads.A_THREAD", 1000)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        three = norm_outcome((16, 64, 128), True, True, 1.0)[0] + heads_outcome(4, 64, 4, 2, 32, False)[0]
    finally:
        torch.set_num_threads(before)
    # Torch adds the rows of the gradient of the weight in an order that depends on the threads.
    assert all(torch.equal(a, b) for n, (a, b) in enumerate(zip(one, three, strict=True)) if n != 3)


def test_a_stream_whose_norm_is_unused_passes_its_gradient_on():
    x = torch.randn(2, 4, 16, requires_grad=True)
    delta = torch.randn(2, 4, 16).to(BF16).requires_grad_()
    weight = torch.ones(16, requires_grad=True)
    s, _, _ = add_norm(x, delta, weight, None, 1e-5, "rms", BF16)
    s.backward(torch.full_like(s, 0.1))
    assert torch.equal(x.grad, torch.full_like(x, 0.1))
    assert torch.equal(delta.grad, x.grad.to(BF16))
    assert weight.grad is None


def test_other_dtypes_and_norms_stay_with_torch():
    x, weight = torch.randn(2, 4, 16, requires_grad=True), torch.ones(16)
    for kind, dtype in (("rms", torch.float32), ("layer", BF16)):
        _, y, _ = add_norm(x, None, weight, None, 1e-5, kind, dtype)
        assert "InC" not in y.grad_fn.name()
    assert "InC" not in rotary(x.reshape(1, 2, 4, 16), torch.ones(2, 4, 8)).grad_fn.name()
