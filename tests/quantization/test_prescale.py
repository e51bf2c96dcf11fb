"""Automatic pre-scaling: the paper's rule, and that nothing is lost while mu stays at one."""

import torch

from narrowgauge.quantization import GradientState, make_cast
from narrowgauge.quantization.state.prescale import PreScale, applied, next_mu

PLAIN = {"cast": "e4m3", "power_of_two": True}


def test_it_halves_on_overflow_and_doubles_over_a_thousand_steps():
    mu = torch.tensor(1.0)
    assert next_mu(mu, torch.tensor(1.1e-5)) == 0.5
    for _ in range(1000):
        mu = next_mu(mu, torch.tensor(0.9e-5))
    torch.testing.assert_close(mu, torch.tensor(2.0), rtol=1e-4, atol=0)


def test_what_is_applied_is_a_power_of_two():
    mu = torch.tensor([0.3, 0.5, 0.99, 1.0, 1.9, 2.0])
    assert applied(mu).tolist() == [0.25, 0.5, 0.5, 1, 1, 2]


def test_on_the_wire_it_begins_with_one_over_the_root_of_the_devices():
    unknown, known = PreScale(mu=0), PreScale(mu=1)
    for factor in (unknown, known):
        factor.begin(4)
        factor.begin(16)  # only the first counts
    assert (unknown.tensors["mu"], known.tensors["mu"]) == (0.5, 1)


def gradient_with(mu, x):
    state = GradientState(x.shape, make_cast(PLAIN | {"prescale": True}))
    state.prescale.tensors["mu"].fill_(mu)
    state.add(x, None)
    return state


def test_a_factor_of_one_changes_nothing():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    plain = GradientState(x.shape, make_cast(PLAIN))
    plain.add(x, None)
    scaled = gradient_with(1.0, x)
    assert torch.equal(plain.read(), scaled.read())
    assert scaled.prescale.tensors["overflowed"] == 0


def test_a_larger_factor_trades_the_largest_elements_for_the_smallest():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=g) * torch.exp(2 * torch.randn(64, 64, generator=g))
    plain, scaled = gradient_with(1.0, x), gradient_with(8.0, x)
    share = (x.abs() > scaled.read().abs().max()).float().mean()
    assert scaled.prescale.tensors["overflowed"] == share > 0
    assert (scaled.read() == 0).sum() < (plain.read() == 0).sum()
    scaled.is_empty = True  # the next step
    scaled.add(x, None)
    assert 4 <= scaled.prescale.tensors["mu"] < 4.01


def test_it_finds_the_room_that_there_is():
    """From far too large a factor down to one with which nothing overflows, and no further."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    state = gradient_with(64.0, x)
    for _ in range(20):
        state.is_empty = True
        state.add(x, None)
    assert state.prescale.tensors["overflowed"] == 0
    assert 0.5 <= applied(state.prescale.tensors["mu"]) <= 1


def test_what_is_not_finite_stays_so():
    x = torch.ones(8, 8)
    x[3, 3] = torch.inf
    assert not gradient_with(1.0, x).read().isfinite().any()
