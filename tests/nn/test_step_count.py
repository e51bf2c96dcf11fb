"""Steps of a loop that does not say them: accumulation, evaluation and recomputation begin none. And random
bits: a function of (seed, step, tensor, element), and the same however a batch is cut."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.nn import Linear
from narrowgauge.recipes import GEMM_PLACES
from nn import layers
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


B, T, K, N = 4, 32, 96, 64
STOCHASTIC = {"cast": "mxfp4", "rounding": "stochastic"}


def make_model(r="nvfp4"):
    torch.manual_seed(0)
    return ng.convert(torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.Tanh(), torch.nn.Linear(N, N)), r)


def gradients(model, x, dy):
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x).backward(dy)
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


def test_bits_are_those_of_the_place_in_training():
    x, dy = layers.batch(B, T)
    first, model = [], make_model()
    for place in ((1, 2, 4), (9, 9, 9), (1, 2, 4), (2, 2, 4), (1, 3, 4), (1, 2, 5)):  # seed, step, sample
        ng.set_step(model, *place)
        found = gradients(model, x, dy)
        first = first or found
        *equal, last_bias = map(torch.equal, first, found)
        assert last_bias, "the sum of dy: nothing random before it"
        assert equal == [place == (1, 2, 4)] * len(equal)
    keys = torch.cat([m.keys for m in model if isinstance(m, Linear)])
    assert len(keys.unique(dim=0)) == 2 * (len(GEMM_PLACES) + 4), "every tensor has its own"
    ng.set_step(model := make_model("mxfp4"), 1, 1, 0)
    assert all(m.keys is None for m in model if isinstance(m, Linear)), "but none without random bits"


@pytest.mark.parametrize("place", ["fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"])
@pytest.mark.parametrize("cuts", [(1, 2, 1), (2, 2)])
def test_cutting_a_batch_does_not_change_the_bits(place, cuts):
    """With blocks within one sequence (T is a whole number of blocks), so that scales are the same too."""
    under, (x, dy) = (
        layers.make(ng.recipe("fp32").with_places({place: STOCHASTIC}), bias=False),
        layers.batch(B, T),
    )

    def outcome(first, last, step=6):
        ng.set_step(under, 5, step, first)
        part = x[first:last].clone().requires_grad_()
        under.weight.grad = None
        y = under(part)
        y.backward(dy[first:last])
        return y.detach(), part.grad, under.weight.grad

    whole, other = outcome(0, B), outcome(0, B, step=7)
    firsts = [sum(cuts[:i]) for i in range(len(cuts))]
    ys, dxs, dws = zip(*(outcome(f, f + n) for f, n in zip(firsts, cuts, strict=True)), strict=True)
    for found, expected in zip((torch.cat(ys), torch.cat(dxs), sum(dws)), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    which = "fdw".index(place[0])
    assert (other[which] - whole[which]).abs().max() > 1e-2, "other bits would have been seen"


def test_without_set_step_each_forward_pass_with_gradients_is_a_step():
    x, dy = layers.batch(B, T)
    model, twin, together = make_model(), make_model(), make_model()
    first, second = gradients(model, x, dy), gradients(model, x, dy)
    assert not any(map(torch.equal, first[:-1], second[:-1]))
    with torch.no_grad():
        twin(x)  # looking at a model does not move it
    assert layers.same(gradients(twin, x, dy), first)
    assert layers.same(gradients(twin, x, dy), second)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    ys = [together(t) for t in xs]
    for y in reversed(ys):  # backward passes after later forward passes have their own bits
        y.backward(dy)
    assert layers.same([t.grad for t in xs], [first[0], second[0]])
