"""Cross entropy by kernel, against torch in float64 and against the reference."""

import math

import pytest
import torch

import narrowgauge.kernels.cross_entropy as ce
from narrowgauge.kernels.cross_entropy import IGNORED, cross_entropy

SHAPES = [(5, 137), (3, 4096), (2, 4096 * 2 + 19), (1, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def on_gpu(device):
    from narrowgauge.kernels.triton import cross_entropy as on_gpu

    return on_gpu


def drawn(rows, width, dtype, device, spread=5.0):
    generator = torch.Generator().manual_seed(rows * width)
    z_TV = (torch.randn(rows, width, generator=generator) * spread).to(dtype)
    return z_TV.to(device), torch.randint(width, (rows,), generator=generator).to(device)


def exact(z_TV, y_T, factor=1.0):
    """(losses, gradients) in float64."""
    z_TV = z_TV.double()
    p_TV = z_TV.softmax(-1)
    one_TV = torch.nn.functional.one_hot(y_T, z_TV.shape[1])
    return torch.nn.functional.cross_entropy(z_TV, y_T, reduction="none"), (p_TV - one_TV) * factor


def poisoned(z_TV):
    return torch.full_like(z_TV, float("nan"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_losses_and_gradients_are_those_of_float64(on_gpu, device, shape, dtype):
    z_TV, y_T = drawn(*shape, dtype, device)
    factor = torch.tensor(0.7, device=device)
    loss_T, stats_2T = on_gpu.losses(z_TV, y_T, None)
    out_TV = poisoned(z_TV)
    on_gpu.write_gradients(z_TV, y_T, stats_2T, factor, None, out_TV)
    expected_T, expected_TV = exact(z_TV, y_T, factor.double())
    # Differences z - max of up to 50 are rounded (2^-24 of them), exponentials and the logarithm are good to
    # 2 ulp on a GPU, and an exponent of 50 loses 2^-24 of itself when it is multiplied by log2(e).
    torch.testing.assert_close(loss_T.double(), expected_T, rtol=2e-6, atol=1e-5)
    half = torch.finfo(dtype).eps / 2
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    # p is good to the same 1e-5 of itself (exponents of 50 again); p - 1 to 2^-23; then one rounding.
    bound_TV = half * expected_TV.abs() * 1.01 + 1e-5 * expected_TV.abs() + 2.0**-22 * (z_TV == 0) + tiny
    bound_TV += 2.0**-22 * torch.nn.functional.one_hot(y_T, shape[1])
    assert ((out_TV.double() - expected_TV).abs() <= bound_TV).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_numbers_are_exact_every_bit_is_the_references(on_gpu, device, dtype):
    """Equal logits: exponentials are 1, their sum is the vocabulary, p a power of two."""
    z_TV = torch.full((3, 8192), 1.5, dtype=dtype, device=device)
    y_T = torch.tensor([0, 8191, 4000], device=device)
    factor = torch.tensor(0.25, device=device)
    loss_T, stats_2T = on_gpu.losses(z_TV, y_T, None)
    assert stats_2T.tolist() == [[1.5] * 3, [8192.0] * 3]
    assert loss_T.tolist() == pytest.approx([math.log(8192)] * 3, rel=2e-7)
    out_TV, expected_TV = poisoned(z_TV), poisoned(z_TV)
    on_gpu.write_gradients(z_TV, y_T, stats_2T, factor, None, out_TV)
    ce.write_gradients(z_TV, y_T, None, factor, False, expected_TV)
    assert torch.equal(out_TV, expected_TV)


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize("ignored", [None, IGNORED])
def test_one_launch_gives_the_bits_of_two(on_gpu, device, z_loss, ignored):
    z_TV, y_T = drawn(3, 4096 + 19, torch.bfloat16, device)
    if ignored is not None:
        y_T[1] = ignored
    factor, two_TV = torch.tensor(0.7, device=device), z_TV.clone()
    loss_T, stats_2T = on_gpu.losses(z_TV, y_T, ignored)
    on_gpu.write_gradients(two_TV, y_T, stats_2T, factor, ignored, two_TV, z_loss)
    together = on_gpu.losses(z_TV, y_T, ignored, factor, z_loss)
    for one, two in zip((z_TV, *together), (two_TV, loss_T, stats_2T), strict=True):
        assert torch.equal(one, two)


def test_rows_may_lie_apart_and_gradients_over_logits(on_gpu, device):
    z_TV, y_T = drawn(4, 300, torch.bfloat16, device)
    apart_TV = torch.full((4, 320), float("nan"), dtype=torch.bfloat16, device=device)[:, :300]
    apart_TV.copy_(z_TV)
    factor = torch.tensor(0.25, device=device)
    loss_T, stats_2T = on_gpu.losses(z_TV, y_T, None)
    of_apart_T, of_apart_2T = on_gpu.losses(apart_TV, y_T, None)
    assert torch.equal(loss_T, of_apart_T)
    out_TV = poisoned(z_TV)
    on_gpu.write_gradients(z_TV, y_T, stats_2T, factor, None, out_TV)
    on_gpu.write_gradients(apart_TV, y_T, of_apart_2T, factor, None, apart_TV)
    assert torch.equal(out_TV, apart_TV)
    assert apart_TV._base[:, 300:].isnan().all()


INF, NAN = float("inf"), float("nan")
ROWS = [
    [3e4, -3e4, 0.0],
    [-INF, 1.0, 2.0],
    [1.0, -INF, -INF],
    [-INF, -INF, -INF],
    [INF, 0.0, 1.0],
    [INF, INF, 1.0],
    [0.0, 1.0, NAN],
    [NAN, 0.0, 1.0],
    [NAN, NAN, NAN],
    [1e-45, 0.0, -1e-45],
    [3e38, -3e38, 3e38],
]


@pytest.mark.parametrize("width", [3, 9000])
def test_extreme_rows_are_as_in_the_reference(on_gpu, device, width):
    """In three lanes of one block, and in blocks apart."""
    rows_TV = torch.full((len(ROWS), width), -INF, device=device)
    rows_TV[:, :: (width - 1) // 2] = torch.tensor(ROWS, device=device)
    y_T = torch.full((len(ROWS),), (width - 1) // 2, device=device)
    loss_T, stats_2T = on_gpu.losses(rows_TV, y_T, None)
    expected_T = ce._losses(rows_TV, y_T, False)
    torch.testing.assert_close(loss_T, expected_T, equal_nan=True, rtol=1e-6, atol=1e-6)
    out_TV, expected_TV, one = poisoned(rows_TV), poisoned(rows_TV), torch.ones((), device=device)
    on_gpu.write_gradients(rows_TV, y_T, stats_2T, one, None, out_TV)
    ce.write_gradients(rows_TV, y_T, None, one, False, expected_TV)
    torch.testing.assert_close(out_TV, expected_TV, equal_nan=True, rtol=1e-6, atol=1e-7)


def test_ignored_targets_give_nothing_and_ids_beyond_the_vocabulary_nan(on_gpu, device):
    z_TV, _ = drawn(6, 50, torch.float32, device)
    y_T = torch.tensor([3, IGNORED, 50, -1, 2**40, 49], device=device)
    loss_T, stats_2T = on_gpu.losses(z_TV, y_T, IGNORED)
    out_TV = poisoned(z_TV)
    on_gpu.write_gradients(z_TV, y_T, stats_2T, torch.ones((), device=device), IGNORED, out_TV)
    assert loss_T.isnan().tolist() == [False, False, True, True, True, False]
    assert loss_T[1] == 0
    assert not out_TV[1].any()
    assert out_TV.isnan().all(1).tolist() == [False, False, True, True, True, False]
    assert out_TV.isnan().any(1).tolist() == [False, False, True, True, True, False]
    assert on_gpu.losses(z_TV, y_T, None)[0].isnan()[1], "without leave, nothing is ignored"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("targets", [None, 5])
def test_the_loss_and_its_gradient_through_autograd(device, overwrite, targets):
    z_TV, y_T = drawn(6, 50, torch.float32, device)
    if targets is not None:
        y_T[2] = IGNORED
    z_BTV, y_BT = z_TV.view(2, 3, 50), y_T.view(2, 3)
    leaf = z_BTV.clone().requires_grad_()
    loss = cross_entropy(leaf * 1, y_BT, targets, overwrite)  # a leaf's own numbers are not for overwriting
    (3 * loss).backward()
    wide = z_TV.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(wide, y_T, ignore_index=IGNORED)
    (3 * expected).backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(leaf.grad.view(6, 50).double(), wide.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("targets", [None, 5])
@pytest.mark.parametrize("kernels", ["0", "1"])
def test_the_z_loss_is_a_term_of_its_own_with_its_exact_gradient(device, monkeypatch, targets, kernels):
    monkeypatch.setenv("NARROWGAUGE_KERNELS", kernels)
    z_TV, y_T = drawn(6, 500, torch.float32, device)
    if targets is not None:
        y_T[2] = IGNORED
    leaf = z_TV.clone().requires_grad_()
    objective, loss, z_loss = cross_entropy(leaf * 1, y_T, targets, overwrite=True, z_loss=0.01)
    objective.backward()
    wide = z_TV.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(wide, y_T, ignore_index=IGNORED)
    expected_z = 0.01 * wide.logsumexp(-1)[y_T != IGNORED].square().mean()
    (expected + expected_z).backward()
    assert z_loss.item() == pytest.approx(expected_z.item(), rel=1e-6)
    assert objective.item() == pytest.approx(expected.item() + expected_z.item(), rel=1e-6)
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-5, atol=1e-7)
    assert loss.item() == cross_entropy(z_TV, y_T, targets).item(), "what is reported stays the same"


def test_a_second_backward_pass_over_gradients_is_refused(device):
    leaf = torch.randn(2, 3, 50, device=device, requires_grad=True)
    loss = cross_entropy(leaf * 1, torch.zeros(2, 3, dtype=torch.long, device=device), overwrite=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_tokens_are_no_launch(on_gpu, device):
    loss_T, stats_2T = on_gpu.losses(
        torch.empty(0, 7, device=device), torch.empty(0, dtype=torch.long, device=device), None
    )
    assert (loss_T.shape, stats_2T.shape) == ((0,), (2, 0))
