"""Errors of averaged gradients, against averages that are computed one by one."""

import math

import pytest
import torch

from narrowgauge.trainer.analysis.averaging import GroupErrors, effective_bits, slope


def errors_of(draws):
    group = GroupErrors()
    for error in draws:
        group.add({"a": error[:3], "b": error[3:]})
    return group.squared_errors()


@pytest.mark.parametrize("count", [1, 2, 7, 8, 13])
def test_each_group_of_a_power_of_two_is_averaged(count):
    draws = torch.randn(count, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    expected = []
    size = 1
    while size <= count:
        means = draws[: count // size * size].view(-1, size, 5).mean(1)
        expected.append(means.square().sum(1).mean().item())
        size *= 2
    assert errors_of(draws) == pytest.approx(expected, rel=1e-12)


def test_noise_gains_half_a_bit_when_draws_double_and_bias_gains_nothing():
    noise = torch.randn(256, 2000, generator=torch.Generator().manual_seed(0))
    assert slope([effective_bits(e) for e in errors_of(noise)]) == pytest.approx(0.5, abs=0.01)
    bias = torch.ones(8, 2000)
    assert slope([effective_bits(e) for e in errors_of(bias)]) == 0
    both = slope([effective_bits(e) for e in errors_of(noise[:8] + 1)])
    assert 0.1 < both < 0.4
    assert (effective_bits(0.25), effective_bits(0.0)) == (1, math.inf)
