"""A loop that changes from torch's AdamW to narrowgauge's goes on with its moments, or is told why not."""

import copy

import pytest
import torch

import narrowgauge as ng
from narrowgauge.system.errors import UserError


def stepped(optimizer, parameters, steps):
    for n in steps:
        g = torch.Generator().manual_seed(n)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()


def made(kind=torch.optim.AdamW, steps=4, **options):
    """Parameters, and their optimizer after some steps of two groups; one parameter never had a gradient."""
    torch.manual_seed(0)
    p, q, unused = (torch.nn.Parameter(torch.randn(64, 64)) for _ in range(3))
    optimizer = kind([{"params": [p], "lr": 1e-2}, {"params": [q, unused], "weight_decay": 0.3}], **options)
    stepped(optimizer, [p, q], range(steps))
    return [p, q, unused], optimizer


def ours(parameters, recipe="fp32", cls=ng.AdamW):
    p, *rest = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    return [p, *rest], cls([{"params": [p]}, {"params": rest}], recipe)


@pytest.mark.parametrize("options", [{"fused": True}, {"betas": (0.8, 0.9), "eps": 1e-6}])
def test_it_goes_on_as_torchs_would_have(options):
    parameters, optimizer = made(**options)
    mine, my_optimizer = ours(parameters)
    my_optimizer.load_state_dict(optimizer.state_dict())
    stepped(optimizer, parameters[:2], range(4, 8))
    stepped(my_optimizer, mine[:2], range(4, 8))
    for a, b in zip(mine, parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert [g["lr"] for g in my_optimizer.param_groups] == [1e-2, 1e-3]
    assert all("foreach" not in group for group in my_optimizer.param_groups)


@pytest.mark.parametrize("recipe", ["coat", "msamp-o2"])
def test_moments_are_rounded_once_to_the_recipes_casts(recipe):
    parameters, optimizer = made()
    mine, my_optimizer = ours(parameters, recipe)
    my_optimizer.load_state_dict(optimizer.state_dict())
    for p, theirs in zip(mine[:2], parameters[:2], strict=True):
        for place, name in (("m", "exp_avg"), ("v", "exp_avg_sq")):
            kept, expected = my_optimizer.state[p][place], optimizer.state[theirs][name]
            rounded = kept.like(kept.cast)
            rounded.write(expected)
            assert torch.equal(kept.read(), rounded.read())
            assert not torch.equal(kept.read(), expected)
    assert my_optimizer.state[mine[2]]["step"] == 0
    assert not my_optimizer.state[mine[2]]["m"].read().any()


REFUSED = {
    "amsgrad": (lambda: made(amsgrad=True), ng.AdamW, "has amsgrad = True"),
    "decay in the gradient": (lambda: made(torch.optim.Adam), ng.AdamW, "Adam with weight decay is not"),
    "SGD": (lambda: made(torch.optim.SGD, momentum=0.9), ng.AdamW, "another model or recipe: '0.m"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_state_is_refused_and_changes_nothing(name):
    make, cls, says = REFUSED[name]
    _, optimizer = ours(made()[0], cls=cls)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UserError, match=says):
        optimizer.load_state_dict(make()[1].state_dict())
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(t, before["state"][key][name]) for name, t in state.items())
