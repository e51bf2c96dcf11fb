"""Cases of layers and optimizers of MS-AMP (its tests/nn, tests/optim); others stand in test_adamw.py.

10 a small layer, 15 gradients unscaled, 16 training that goes down in every epoch.
"""

import copy
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
    """Rows one by one are the batch: gradients are rounded four times, or once."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for batches in (x.split(1), [x]):
        ours, plain = layers(name)
        for batch in batches:
            y, expected = ours(batch), plain(batch)
            assert y.dtype == torch.float32
            torch.testing.assert_close(y, expected, rtol=0, atol=0.1)
            y.sum().backward()
            expected.sum().backward()
        assert torch.equal(ours.bias.grad, plain.bias.grad)
        spacing = len(batches) * SPACING
        torch.testing.assert_close(gradient_of(ours.weight), plain.weight.grad, rtol=spacing, atol=0.1)


@pytest.mark.parametrize("of", ["dense", "transposed", "sliced"])
def test_unscaled_by_a_quarter(of):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    x = {"dense": x, "transposed": x.T, "sliced": x[:, :3]}[of]
    state = GradientState(x.shape, E4M3)
    state.add(x, None)
    before = state.read().clone()
    state.scale_by(torch.tensor(0.25))
    assert torch.equal(state.read(), before * 0.25)


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
