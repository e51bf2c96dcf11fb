"""Steps of a loop that does not say them: accumulation, evaluation and recomputation begin none."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from nn.own_loop import assert_same, batch, model

RECIPE = "fp8-delayed"


def histories(m):
    return ng.state_dict(m)["recipe"]


def said(steps=3, parts=2):
    """Histories of a loop that sets each step."""
    m = model(RECIPE)
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    for step in range(1, steps + 1):
        for part in range(parts):
            ng.set_step(m, 0, step, 16 * part)
            m(batch(parts * step + part).requires_grad_()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return histories(m)


@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_an_optimizer_is_heard(to_none, reentrant):
    """Micro-batches, evaluations and recomputed passes do not count as steps, from the first step on."""
    m = model(RECIPE)
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    for step in range(1, 4):
        for part in range(2):
            x = batch(2 * step + part).requires_grad_()
            y = m(x) if reentrant is None else checkpoint(m, x, use_reentrant=reentrant)
            y.square().mean().backward()
            with torch.no_grad():
                m(batch(99))
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    assert_same(histories(m), said())


def test_a_loop_without_an_optimizer_says_its_steps():
    m, alone = model(RECIPE), model(RECIPE)
    for step in range(1, 4):
        for part in range(2):
            m(batch(2 * step + part)).square().mean().backward()
        alone(batch(step)).square().mean().backward()
        for each in (m, alone):
            with torch.no_grad():
                for p in each.parameters():
                    p -= 1e-3 * p.grad
                    p.grad = None
        ng.step(m)
    for each in (m, alone):
        entries = each[0].histories["fprop.x"].entries
        assert entries.count_nonzero() == 2  # the third step has not ended


def test_other_models_optimizers_do_not_count_where_steps_are_said():
    m, other = model(RECIPE), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    ng.step(m)
    for part in range(3):
        m(batch(part)).square().mean().backward()
        other(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert not m[0].histories["fprop.x"].entries.any()
    ng.step(m)
    m(batch(9))
    assert m[0].histories["fprop.x"].entries.count_nonzero() == 1


def through_two_passes(m, optimizer, steps, reentrant=None):
    """Train with losses of two forward passes each."""
    for step in steps:
        a, b = (
            m(x) if reentrant is None else checkpoint(m, x, use_reentrant=reentrant)
            for x in (scale * batch(step).requires_grad_() for scale in (1, 5))
        )
        (a - b).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_loss_of_two_passes_is_resumed_to_the_same_histories():
    m = model(RECIPE)
    optimizer = torch.optim.SGD(m.parameters(), lr=1e-2)
    through_two_passes(m, optimizer, range(3))
    saved = deepcopy(ng.state_dict(m, optimizer))
    through_two_passes(m, optimizer, range(3, 5))
    again = model(RECIPE)  # it has heard of no step
    its_optimizer = torch.optim.SGD(again.parameters(), lr=1e-2)
    ng.load_state_dict(again, its_optimizer, saved)
    through_two_passes(again, its_optimizer, range(3, 5))
    assert_same(histories(again), histories(m))


def test_recomputing_two_passes_of_a_loss_counts_neither():
    plain, recomputed = model("nvfp4"), model("nvfp4")
    for m, reentrant in ((plain, None), (recomputed, False)):
        through_two_passes(m, torch.optim.SGD(m.parameters(), lr=1e-2), range(3), reentrant)
    assert_same(recomputed.state_dict(), plain.state_dict())


def test_a_loop_that_no_longer_sets_steps_may_say_them():
    m = model(RECIPE)
    ng.set_step(m, 0, 1, 0)
    m(batch()).square().mean().backward()
    for number in range(2, 4):
        ng.step(m)
        m(batch(number)).square().mean().backward()
    assert m[0].histories["fprop.x"].entries.count_nonzero() == 2
