"""MS-AMP's portable cases of layers and optimizers (its tests/nn, tests/optim); 7, 11 and 12 stand elsewhere.

10 a small layer, 14 clipping to an L1 norm, 15 gradients unscaled and searched for what is not finite, 16
training that goes down in every epoch.
"""

import copy
import math
from itertools import pairwise

import pytest
import torch

import narrowgauge as ng
from narrowgauge.quantization import GradientState, gradient_of, make_cast

LEVELS = ["msamp-o1", "msamp-o2", "msamp-o3"]
SPACING = 2.0**-3  # of E4M3, relative; the recipes round gradients with random bits, up or down
E4M3 = make_cast({"cast": "e4m3", "power_of_two": True})


def layers(name, inputs=4, outputs=8):
    """(under a recipe, in fp32) from the same weights."""
    torch.manual_seed(1000)
    plain = torch.nn.Linear(inputs, outputs)
    return ng.convert(torch.nn.Sequential(copy.deepcopy(plain)), name)[0], plain


@pytest.mark.parametrize("name", LEVELS)
def test_a_small_layer(name):
    ours, plain = layers(name)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    y, expected = ours(x), plain(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=0, atol=0.1)
    y.sum().backward()
    expected.sum().backward()
    assert torch.equal(ours.bias.grad, plain.bias.grad)
    torch.testing.assert_close(gradient_of(ours.weight), plain.weight.grad, rtol=SPACING, atol=0.1)


@pytest.mark.parametrize("name", LEVELS)
def test_rows_one_by_one_are_the_batch(name):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    found = []
    for batches in (x.split(1), [x]):
        ours, _ = layers(name)
        for batch in batches:
            ours(batch).sum().backward()
        found.append(gradient_of(ours.weight))
    torch.testing.assert_close(*found, rtol=4 * SPACING, atol=0.1)  # rounded four times, and once


@pytest.mark.parametrize("name", ["fp32", *LEVELS])
def test_clipped_to_an_l1_norm_of_one(name):
    ours, _ = layers(name)
    ours(torch.randn(4, 4, generator=torch.Generator().manual_seed(0))).sum().backward()
    optimizer = ng.AdamW(ours.parameters(), name)
    before = [gradient_of(p).clone() for p in ours.parameters()]
    total = sum(g.abs().sum() for g in before)
    torch.testing.assert_close(optimizer.clip_grad_norm_(1.0, norm_type=1.0), total, rtol=1e-5, atol=0)
    for p, g in zip(ours.parameters(), before, strict=True):
        torch.testing.assert_close(gradient_of(p), g / total, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", LEVELS)
def test_clipping_leaves_narrow_gradients_narrow(name):
    ours, _ = layers(name)
    optimizer = ng.AdamW(ours.parameters(), recipe=name)
    ours(torch.ones(4, 4)).sum().backward()
    optimizer.clip_grad_norm_(1.0)
    assert ours.weight.narrowgauge.gradient.wide is None, "a float32 gradient costs four times the memory"


@pytest.mark.parametrize("of", ["dense", "transposed", "sliced"])
def test_unscaled_by_a_quarter(of):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    x = {"dense": x, "transposed": x.T, "sliced": x[:, :3]}[of]
    state = GradientState(x.shape, E4M3)
    state.add(x, None)
    before = state.read().clone()
    state.scale_by(torch.tensor(0.25))
    assert torch.equal(state.read(), before * 0.25)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["fp32", *LEVELS])
def test_what_is_not_finite_is_found_and_goes_nowhere(name, bad):
    ours, _ = layers(name)
    optimizer = ng.AdamW(ours.parameters(), name)
    dy = torch.ones(4, 8)
    dy[2, 3] = bad
    ours(torch.ones(4, 4)).backward(dy)
    assert not optimizer.clip_grad_norm_(1.0).isfinite()


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("name", LEVELS)
def test_every_epoch_ends_lower(name, accumulated):
    ours, _ = layers(name, 4, 4)
    optimizer = ng.AdamW(ours.parameters(), name, lr=1e-2)
    batches = torch.randn(8, 4, 4, generator=torch.Generator().manual_seed(0)).abs()
    losses = []
    for _ in range(10):
        losses.append(0.0)
        for number, batch in enumerate(batches, start=1):
            loss = ours(batch).sum()
            loss.backward()
            losses[-1] += loss.item()
            if number % accumulated == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert all(later < earlier for earlier, later in pairwise(losses))
