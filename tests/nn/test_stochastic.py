"""Random bits: a function of (seed, step, tensor, element), unbiased, and the same however a batch is cut."""

import pytest
import torch

from narrowgauge.nn import Linear, convert, set_step
from narrowgauge.recipes import GEMM_PLACES, recipe

B, T, K, N = 4, 32, 96, 64


def make_model(r="nvfp4", seed=0):
    torch.manual_seed(seed)
    return convert(torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.Tanh(), torch.nn.Linear(N, N)), r)


def batch(seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, K, generator=g), torch.randn(B, T, N, generator=g)


def gradients(model, x, dy):
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x).backward(dy)
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


def at(model, seed, step, first_sample, x, dy):
    set_step(model, seed, step, first_sample)
    return gradients(model, x, dy)


def same(a, b):
    return [torch.equal(u, v) for u, v in zip(a, b, strict=True)]


def test_the_same_place_in_training_has_the_same_bits():
    x, dy = batch()
    first = at(make_model(), 1, 2, 3, x, dy)
    model = make_model()
    at(model, 9, 9, 9, x, dy)
    assert all(same(first, at(model, 1, 2, 3, x, dy)))


@pytest.mark.parametrize("other", [(2, 2, 4), (1, 3, 4), (1, 2, 5)], ids=["seed", "step", "sample"])
def test_another_place_has_others(other):
    x, dy = batch()
    equal = same(at(make_model(), 1, 2, 4, x, dy), at(make_model(), *other, x, dy))
    last_bias = equal.pop()  # the sum of dy: nothing random before it
    assert last_bias
    assert not any(equal)


def test_every_tensor_has_its_own_bits():
    r = recipe("fp32").with_places({"dgrad.dy": {"cast": "mxfp4", "rounding": "stochastic"}})
    layer = torch.nn.Linear(K, N, bias=False)
    x, dy = batch()
    dx = []
    for index in (0, 1):
        under = Linear(layer, r, index)
        under.set_position(1, 1, 0)
        dx.append(gradients(under, x, dy)[0])
    assert not torch.equal(*dx)
    keys = torch.cat([m.keys for m in make_model() if isinstance(m, Linear)])
    assert len(keys.unique(dim=0)) == 2 * (len(GEMM_PLACES) + 4)


@pytest.mark.parametrize("place", ["fprop.x", "dgrad.dy", "wgrad.dy", "wgrad.x"])
@pytest.mark.parametrize("cuts", [(1, 1, 1, 1), (1, 2, 1), (3, 1), (2, 2)])
def test_cutting_a_batch_does_not_change_the_bits(place, cuts):
    """With blocks within one sequence (T is a whole number of blocks), so that scales are the same too."""
    r = recipe("fp32").with_places({place: {"cast": "mxfp4", "rounding": "stochastic"}})
    under = Linear(torch.nn.Linear(K, N, bias=False), r, 0)
    x, dy = batch()

    def outcome(first, last):
        set_step(under, 5, 6, first)
        part = x[first:last].clone().requires_grad_()
        under.weight.grad = None
        y = under(part)
        y.backward(dy[first:last])
        return y.detach(), part.grad, under.weight.grad

    whole = outcome(0, B)
    firsts = [sum(cuts[:i]) for i in range(len(cuts))]
    ys, dxs, dws = zip(*(outcome(f, f + n) for f, n in zip(firsts, cuts, strict=True)), strict=True)
    torch.testing.assert_close(torch.cat(ys), whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(dxs), whole[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sum(dws), whole[2], rtol=1e-4, atol=1e-4)
    set_step(under, 5, 7, 0)  # other bits would have been seen
    x.requires_grad_()
    y = under(x)
    y.backward(dy)
    changed = {"f": (y, whole[0]), "d": (x.grad, whole[1]), "w": (under.weight.grad - whole[2], whole[2])}
    assert (changed[place[0]][0] - changed[place[0]][1]).abs().max() > 1e-2


def test_without_set_step_each_forward_pass_with_gradients_is_a_step():
    x, dy = batch()
    model, twin = make_model(), make_model()
    first, second = gradients(model, x, dy), gradients(model, x, dy)
    assert not any(same(first, second)[:-1])
    with torch.no_grad():
        twin(x)  # looking at a model does not move it
    assert all(same(first, gradients(twin, x, dy)))
    assert all(same(second, gradients(twin, x, dy)))


def test_backward_passes_after_later_forward_passes_have_their_own_bits():
    x, dy = batch()
    model, twin = make_model(), make_model()
    expected = [gradients(twin, x, dy)[0] for _ in range(2)]
    xs = [x.clone().requires_grad_() for _ in range(2)]
    ys = [model(t) for t in xs]
    for y in reversed(ys):
        y.backward(dy)
    assert all(same([t.grad for t in xs], expected))


def test_set_step_leaves_layers_without_random_bits_alone():
    model = make_model("mxfp4")
    set_step(model, 1, 1, 0)
    assert all(m.keys is None for m in model if isinstance(m, Linear))


@pytest.mark.parametrize("gemm", ["dgrad", "wgrad"])
def test_with_headroom_the_mean_of_many_passes_is_the_exact_gradient(gemm):
    """Each fourfold number of passes halves the error, so only chance is left in it."""
    errors = errors_of_means(gemm, headroom=16 / 17)
    assert errors[1] > 0.05
    for n in (4, 16, 64, 256):
        assert 0.85 < errors[n] * n**0.5 / errors[1] < 1.15


@pytest.mark.parametrize("gemm", ["dgrad", "wgrad"])
def test_without_headroom_what_remains_is_the_clipping(gemm):
    """A scale rounded down lets elements up to 6.375 be cut to 6: a bias, below two per cent here."""
    errors = errors_of_means(gemm, headroom=1.0)
    chance = errors[1] / 256**0.5
    assert errors[256] < errors[1] / 6
    assert chance < errors[256] < 0.02


def errors_of_means(gemm, headroom):
    """Relative error of the mean of 1, 4, 16, 64, 256 backward passes; only one operand is narrow."""
    hadamard = 16 if gemm == "wgrad" else 0
    narrow = {"cast": "nvfp4", "rounding": "stochastic", "headroom": headroom, "hadamard": hadamard}
    places = {f"{gemm}.dy": narrow}
    if hadamard:
        places["wgrad.x"] = {"cast": "fp32", "hadamard": 16}
    x, dy = batch()
    layer = torch.nn.Linear(K, N, bias=False)
    which = 0 if gemm == "dgrad" else 1
    exact = gradients(Linear(layer, recipe("fp32"), 0), x, dy)[which]
    under = Linear(layer, recipe("fp32").with_places(places), 0)
    total, errors = torch.zeros_like(exact), {}
    for n in range(1, 257):
        total += gradients(under, x, dy)[which]
        errors[n] = ((total / n - exact).norm() / exact.norm()).item()
    return errors
