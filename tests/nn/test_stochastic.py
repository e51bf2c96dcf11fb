"""Random bits: a function of (seed, step, tensor, element), unbiased, and the same however a batch is cut."""

import pytest
import torch

from narrowgauge.nn import Linear, convert, set_step
from narrowgauge.recipes import GEMM_PLACES, recipe
from nn.layers import batch, make, same

B, T, K, N = 4, 32, 96, 64
STOCHASTIC = {"cast": "mxfp4", "rounding": "stochastic"}


def make_model(r="nvfp4"):
    torch.manual_seed(0)
    return convert(torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.Tanh(), torch.nn.Linear(N, N)), r)


def gradients(model, x, dy):
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x).backward(dy)
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


def test_bits_are_those_of_the_place_in_training():
    x, dy = batch(B, T)
    first, model = [], make_model()
    for place in ((1, 2, 4), (9, 9, 9), (1, 2, 4), (2, 2, 4), (1, 3, 4), (1, 2, 5)):  # seed, step, sample
        set_step(model, *place)
        found = gradients(model, x, dy)
        first = first or found
        *equal, last_bias = map(torch.equal, first, found)
        assert last_bias, "the sum of dy: nothing random before it"
        assert equal == [place == (1, 2, 4)] * len(equal)
    keys = torch.cat([m.keys for m in model if isinstance(m, Linear)])
    assert len(keys.unique(dim=0)) == 2 * (len(GEMM_PLACES) + 4), "every tensor has its own"
    set_step(model := make_model("mxfp4"), 1, 1, 0)
    assert all(m.keys is None for m in model if isinstance(m, Linear)), "but none without random bits"


@pytest.mark.parametrize("place", ["fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"])
@pytest.mark.parametrize("cuts", [(1, 2, 1), (2, 2)])
def test_cutting_a_batch_does_not_change_the_bits(place, cuts):
    """With blocks within one sequence (T is a whole number of blocks), so that scales are the same too."""
    under, (x, dy) = make(recipe("fp32").with_places({place: STOCHASTIC}), bias=False), batch(B, T)

    def outcome(first, last, step=6):
        set_step(under, 5, step, first)
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
    x, dy = batch(B, T)
    model, twin, together = make_model(), make_model(), make_model()
    first, second = gradients(model, x, dy), gradients(model, x, dy)
    assert not any(map(torch.equal, first[:-1], second[:-1]))
    with torch.no_grad():
        twin(x)  # looking at a model does not move it
    assert same(gradients(twin, x, dy), first)
    assert same(gradients(twin, x, dy), second)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    ys = [together(t) for t in xs]
    for y in reversed(ys):  # backward passes after later forward passes have their own bits
        y.backward(dy)
    assert same([t.grad for t in xs], [first[0], second[0]])
