"""Steps of a loop that does not say them: accumulation, evaluation and recomputation begin none."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from nn.own_loop import assert_same, batch, model

RECIPE = "fp8-delayed"


def backward(m, number, call=None):
    (call or m)(batch(number).requires_grad_()).square().mean().backward()


@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_an_optimizer_is_heard(to_none, reentrant):
    """Micro-batches, evaluations and recomputed passes do not count as steps, from the first step on."""
    m, said = model(RECIPE), model(RECIPE)
    optimizer, its_optimizer = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (m, said))
    for step in range(1, 4):
        for part in range(2):
            recomputed = None if reentrant is None else lambda x: checkpoint(m, x, use_reentrant=False)
            backward(m, 2 * step + part, recomputed)
            with torch.no_grad():
                m(batch(99))
            ng.set_step(said, 0, step, 16 * part)
            backward(said, 2 * step + part)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        its_optimizer.step()
        its_optimizer.zero_grad()
    assert_same(*(ng.state_dict(each)["recipe"] for each in (m, said)))


@pytest.mark.parametrize("name", [RECIPE, "nvfp4"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_each_recomputed_pass_of_a_loop_without_an_optimizer_is_one_step(name, reentrant):
    """Reentrant, its first pass records no gradients, so the second begins the step."""
    plain, again = model(name), model(name)
    for number in range(1, 5):
        xs = [batch(number).requires_grad_() for _ in range(2)]
        plain(xs[0]).backward(batch(9))
        checkpoint(again, xs[1], use_reentrant=reentrant).backward(batch(9))
        assert torch.equal(xs[0].grad, xs[1].grad)
        for p, other in zip(plain.parameters(), again.parameters(), strict=True):
            assert torch.equal(p.grad, other.grad)
            p.grad = other.grad = None


def ended(m):
    """The steps whose magnitudes are in a history; the last one has not ended."""
    return m[0].histories["fprop.x"].entries.count_nonzero().item()


@pytest.mark.parametrize("sets_first", [False, True])
def test_a_loop_without_an_optimizer_says_its_steps(sets_first):
    """Or drops its gradients, before each pass of another step."""
    m, alone = model(RECIPE), model(RECIPE)
    if sets_first:
        ng.set_step(m, 0, 1, 0)
    for step in range(1, 4):
        for part in range(2):
            backward(m, 2 * step + part)
        backward(alone, step)
        for p in (*m.parameters(), *alone.parameters()):
            p.data -= 1e-3 * p.grad
            p.grad = None
        if step < 3:
            ng.step(m)
    assert ended(m) == ended(alone) == 2
