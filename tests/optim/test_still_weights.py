"""A weight that no step moves stays: under a mask of its gradient, or at a learning rate of 0."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.quantization import state_of
from narrowgauge.recipes import recipe, recipe_names
from nn.own_loop import model

NARROW = [name for name in recipe_names() if recipe(name).state["weight"].name != "fp32"]
#: Other pairs of a weight and its master than those of recipes that ship.
PAIRS = {
    "16 bits over 16 bits": {"weight": "bf16", "master": "fp16-scaled"},
    "blocks over 16 bits": {"weight": "fp8-1x128", "master": "bf16"},
}
RECIPES = {name: name for name in NARROW} | {
    name: recipe("msamp-o3").with_places(places) for name, places in PAIRS.items()
}


def trained(name, lrs, is_masked=False):
    """The stored tensors of the first weight before the first step, and after each."""
    m = model(RECIPES[name], width=64, keep=[])
    optimizer = ng.AdamW(m.parameters(), RECIPES[name], lr=0.0, weight_decay=0.0)
    p = m[0].weight
    if is_masked:
        p.register_hook(lambda g: g * 0)
    found = [p.detach().float().clone()]
    for lr in lrs:
        ng.optim.set_learning_rate(optimizer, lr)
        m(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(p.detach().float().clone())
    assert state_of(p).weight is not None
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_what_no_step_moves_stays(name):
    first, *later = trained(name, [1e-2] * 5, is_masked=True)
    assert [int((w != first).sum()) for w in later] == [0] * 5
    first, _, moved, *still = trained(name, [1e-2, 1e-2, 0.0, 0.0])
    assert not torch.equal(first, moved)
    assert [int((w != moved).sum()) for w in still] == [0, 0]
