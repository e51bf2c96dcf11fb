"""Cross entropy by kernel and by its reference in torch against float64, and its gradient as FP8 codes."""

import math

import pytest
import torch
from torch.nn import functional

import narrowgauge.kernels.cross_entropy as ce
from kernels.common import DTYPES, INF, NAN, assert_same, same_bits
from narrowgauge.kernels.cross_entropy import IGNORED, cross_entropy
from support.interpreted import plain_operations

F32, BF16, _ = DTYPES


def drawn(rows, width, dtype, device, spread=5.0):
    generator = torch.Generator().manual_seed(rows * width)
    z_TV = (torch.randn(rows, width, generator=generator) * spread).to(dtype)
    return z_TV.to(device), torch.randint(width, (rows,), generator=generator).to(device)


def outcome(z_TV, y_T, factor=1.0, ignores=False):
    """(losses, gradients), by a kernel where there are kernels; what is allocated is poisoned first."""
    loss_T, _, stats_2T = ce.row_losses(z_TV, y_T, ignores)
    out_TV = torch.full_like(z_TV, NAN)
    factor = torch.as_tensor(factor, dtype=F32, device=z_TV.device)
    ce.write_gradients(z_TV, y_T, stats_2T, factor, ignores, out_TV)
    return loss_T, out_TV


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 137), (2, 4096 * 2 + 19), (1, 1)], ids=str)
def test_losses_and_gradients_are_those_of_float64(where, monkeypatch, shape, dtype):
    """The reference in chunks of two rows."""
    monkeypatch.setattr(ce, "CHUNK_ELEMENTS", 2 * shape[1])
    z_TV, y_T = drawn(*shape, dtype, where)
    loss_T, out_TV = outcome(z_TV, y_T, 0.7)
    one_TV, factor = functional.one_hot(y_T, shape[1]), torch.tensor(0.7).double()
    expected_T = functional.cross_entropy(z_TV.double(), y_T, reduction="none")
    expected_TV = (z_TV.double().softmax(-1) - one_TV) * factor
    # Differences z - max of up to 50 are rounded (2^-24 of them), exponentials and the logarithm are good to
    # 2 ulp on a GPU, and an exponent of 50 loses 2^-24 of itself when it is multiplied by log2(e).
    torch.testing.assert_close(loss_T.double(), expected_T, rtol=2e-6, atol=1e-5)
    half = torch.finfo(dtype).eps / 2
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    # p is good to the same 1e-5 of itself (exponents of 50 again); p - 1 to 2^-23; then one rounding.
    bound_TV = half * expected_TV.abs() * 1.01 + 1e-5 * expected_TV.abs() + 2.0**-22 * (z_TV == 0) + tiny
    bound_TV += 2.0**-22 * one_TV
    assert ((out_TV.double() - expected_TV).abs() <= bound_TV).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_numbers_are_exact_every_bit_is_the_references(device, dtype):
    """Equal logits: exponentials are 1, their sum is the vocabulary, p a power of two."""
    z_TV = torch.full((3, 8192), 1.5, dtype=dtype, device=device)
    y_T = torch.tensor([0, 8191, 4000], device=device)
    assert ce.row_losses(z_TV, y_T, False)[2].tolist() == [[1.5] * 3, [8192.0] * 3]
    loss_T, out_TV = outcome(z_TV, y_T, 0.25)
    assert loss_T.tolist() == pytest.approx([math.log(8192)] * 3, rel=2e-7)
    with plain_operations():
        assert_same([out_TV], outcome(z_TV, y_T, 0.25)[1:])


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize("ignores", [False, True])
def test_one_launch_gives_the_bits_of_two(where, z_loss, ignores):
    z_TV, y_T = drawn(3, 4096 + 19, BF16, where)
    y_T[1] = IGNORED if ignores else 1
    factor, two_TV = torch.tensor(0.7, device=where), z_TV.clone()
    apart = ce.row_losses(z_TV, y_T, ignores, z_loss)
    ce.write_gradients(two_TV, y_T, apart[2], factor, ignores, two_TV, z_loss)
    together = ce.row_losses(z_TV, y_T, ignores, z_loss, factor)
    assert_same((z_TV, *together), (two_TV, *apart))


def test_rows_may_lie_apart_and_gradients_over_logits(device):
    z_TV, y_T = drawn(4, 300, BF16, device)
    apart_TV = torch.full((4, 320), NAN, dtype=BF16, device=device)[:, :300]
    apart_TV.copy_(z_TV)
    loss_T, _, stats_2T = ce.row_losses(apart_TV, y_T, False)
    ce.write_gradients(apart_TV, y_T, stats_2T, torch.tensor(0.25, device=device), False, apart_TV)
    assert_same([loss_T, apart_TV], outcome(z_TV, y_T, 0.25))
    assert apart_TV._base[:, 300:].isnan().all()
    empty_T, *rest = ce.row_losses(z_TV[:0], y_T[:0], False)
    assert (empty_T.shape, rest) == ((0,), [None, None]), "an empty batch launches nothing"


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
def test_extreme_rows_are_those_of_float64(where, width):
    """In three lanes of one block, and in blocks apart."""
    rows_TV = torch.full((len(ROWS), width), -INF, device=where)
    rows_TV[:, :: (width - 1) // 2] = torch.tensor(ROWS, device=where)
    y_T = torch.full((len(ROWS),), (width - 1) // 2, device=where)
    wide_TV = rows_TV.double().requires_grad_()
    expected_T = functional.cross_entropy(wide_TV, y_T, reduction="none")
    (expected_TV,) = torch.autograd.grad(expected_T.sum(), wide_TV)
    loss_T, out_TV = outcome(rows_TV, y_T)
    torch.testing.assert_close(loss_T, expected_T.float(), equal_nan=True, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out_TV, expected_TV.float(), equal_nan=True, rtol=1e-6, atol=1e-7)


def test_ignored_targets_give_nothing_and_ids_beyond_the_vocabulary_nan(device):
    z_TV, _ = drawn(6, 50, F32, device)
    y_T = torch.tensor([3, IGNORED, 50, -1, 2**40, 49], device=device)
    loss_T, out_TV = outcome(z_TV, y_T, ignores=True)
    is_bad = [False, False, True, True, True, False]
    assert (
        loss_T.isnan().tolist() == out_TV.isnan().all(1).tolist() == out_TV.isnan().any(1).tolist() == is_bad
    )
    assert loss_T[1] == 0
    assert not out_TV[1].any()
    assert ce.row_losses(z_TV, y_T, False)[0].isnan()[1], "without leave, nothing is ignored"


@pytest.mark.parametrize(("bad", "targets"), [(IGNORED, None), (-1, 3), (8, 3), (-1, None)])
def test_an_id_outside_the_vocabulary_is_an_error_in_plain_torch(bad, targets):
    y_BT = torch.tensor([[1, 2, bad, 3]])
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        cross_entropy(torch.randn(1, 4, 8), y_BT, targets)


@pytest.mark.parametrize(
    ("targets", "overwrite", "z_loss"),
    [(None, False, 0.0), (None, True, 0.0), (5, False, 0.0), (5, True, 0.01), (None, True, 0.01)],
)
def test_the_loss_and_its_gradient_through_autograd(where, targets, overwrite, z_loss):
    """The mean is over the targets that count, and the z-loss a term of its own."""
    z_TV, y_T = drawn(6, 500, F32, where)
    if targets is not None:
        y_T[2] = IGNORED
    leaf = z_TV.view(2, 3, 500).clone().requires_grad_()
    given = leaf * 1  # a leaf's own numbers are not for overwriting
    found = cross_entropy(given, y_T.view(2, 3), targets, overwrite, z_loss)
    (3 * ce.objective_of(found)).backward()
    wide = z_TV.double().requires_grad_()
    expected = functional.cross_entropy(wide, y_T, ignore_index=IGNORED)
    of_z = z_loss * wide.logsumexp(-1)[y_T != IGNORED].square().mean()
    (3 * (expected + of_z)).backward()
    terms = [expected + of_z, expected, of_z] if z_loss else [expected]
    assert found.dtype == torch.float32
    assert found.flatten().tolist() == pytest.approx([x.item() for x in terms], rel=1e-6)
    torch.testing.assert_close(leaf.grad.view(6, 500).double(), wide.grad, rtol=1e-5, atol=1e-7)
    assert same_bits(given.detach().view(6, 500), z_TV) is not overwrite


def test_a_second_backward_pass_over_gradients_is_refused(where):
    leaf = torch.randn(2, 3, 50, device=where, requires_grad=True)
    loss = cross_entropy(leaf * 1, torch.zeros(2, 3, dtype=torch.long, device=where), overwrite=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_only_the_logits_are_kept_for_the_backward_pass():
    z_TV, y_T = drawn(37, 101, BF16, "cpu")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        cross_entropy(z_TV.requires_grad_(), y_T)
    assert [t.dtype for t in kept] == [BF16, torch.int64]
