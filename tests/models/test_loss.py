import pytest
import torch
from torch.nn import functional

import narrowgauge.kernels.cross_entropy as loss_module
from narrowgauge.models import cross_entropy


@pytest.fixture
def logits_and_targets():
    generator = torch.Generator().manual_seed(0)
    logits_BTV = torch.randn(3, 37, 101, generator=generator) * 5
    return logits_BTV, torch.randint(101, (3, 37), generator=generator)


def plain(logits_BTV, y_BT):
    return functional.cross_entropy(logits_BTV.flatten(0, 1).double(), y_BT.flatten())


@pytest.mark.parametrize("elements", [1, 101 * 10, 2**24])
def test_any_chunk_size_gives_the_plain_loss_and_gradient(logits_and_targets, monkeypatch, elements):
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", elements)
    logits_BTV, y_BT = logits_and_targets
    ours = logits_BTV.clone().requires_grad_()
    theirs = logits_BTV.clone().requires_grad_()
    loss, expected = cross_entropy(ours, y_BT), plain(theirs, y_BT)
    (3 * loss).backward()
    (3 * expected).backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)


def test_narrow_logits_are_widened_before_the_exponential(logits_and_targets):
    logits_BTV, y_BT = logits_and_targets
    narrow = logits_BTV.bfloat16().requires_grad_()
    loss = cross_entropy(narrow, y_BT)
    loss.backward()
    wide = logits_BTV.bfloat16().float().requires_grad_()
    cross_entropy(wide, y_BT).backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(plain(wide, y_BT).item(), rel=1e-6)
    assert torch.equal(narrow.grad, wide.grad.bfloat16())


def test_huge_logits_do_not_overflow():
    logits_BTV = torch.tensor([[[3e4, -3e4, 0.0]]], requires_grad=True)
    loss = cross_entropy(logits_BTV, torch.tensor([[1]]))
    loss.backward()
    assert loss.item() == 6e4
    assert logits_BTV.grad.tolist() == [[[1.0, -1.0, 0.0]]]


def test_non_finite_logits_do_not_give_a_finite_loss():
    logits_BTV = torch.zeros(1, 2, 3)
    logits_BTV[0, 1, 2] = float("nan")
    assert cross_entropy(logits_BTV, torch.zeros(1, 2, dtype=torch.long)).isnan()


@pytest.mark.parametrize("target", [-100, 3])
def test_a_target_outside_the_vocabulary_is_an_error(target):
    with pytest.raises(RuntimeError, match="out of bounds"):
        cross_entropy(torch.zeros(1, 1, 3), torch.tensor([[target]]))


def test_only_the_logits_are_kept_for_the_backward_pass(logits_and_targets):
    logits_BTV, y_BT = logits_and_targets
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        cross_entropy(logits_BTV.bfloat16().requires_grad_(), y_BT)
    assert [t.dtype for t in kept] == [torch.bfloat16, torch.int64]
