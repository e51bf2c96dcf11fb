"""Who changes a narrow weight: this package's optimizers, and code that writes while no gradient waits."""

import copy

import pytest
import torch
from torch import nn, optim

import narrowgauge as ng
from narrowgauge.errors import UserError
from nn.own_loop import is_on_page

RECIPES = ("bf16-sr", "msamp-o2", "msamp-o3", "eco")


class ComputedInFloat32(optim.Optimizer):
    """Descent that ends in `copy_`, as Hugging Face's and fairseq's optimizers do."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data.copy_(p.data.float().add(p.grad, alpha=-0.02))


def descent_by_hand(parameters):
    with torch.no_grad():
        for p in parameters:
            p -= 0.1 * p.grad


UPDATES = {
    "AdamW": lambda p: optim.AdamW(p).step(),
    "AdamW, fused": lambda p: optim.AdamW(p, fused=True).step(),
    "AdamW, foreach": lambda p: optim.AdamW(p, foreach=True).step(),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9).step(),
    "SGD, fused": lambda p: optim.SGD(p, lr=0.1, fused=True).step(),
    "SGD, foreach": lambda p: optim.SGD(p, lr=0.1, foreach=True).step(),
    "Adafactor": lambda p: optim.Adafactor(p).step(),
    "Muon": lambda p: optim.Muon(p).step(),
    "copied": lambda p: ComputedInFloat32(p, {}).step(),
    "by hand": descent_by_hand,
}
WRITES = {
    "copy": lambda w: w.copy_(2 * w),
    "initialization": nn.init.zeros_,
    "clamping": lambda w: w.clamp_(-0.01, 0.01),
    "averaging": lambda w: w.lerp_(torch.ones_like(w), 0.5),
    "assignment": lambda w: setattr(w, "data", 2 * w.detach()),
}


def after_backward(name):
    """A model under a recipe whose gradients wait."""
    torch.manual_seed(0)
    m = ng.convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), name, keep=[])
    m(torch.randn(16, 64, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    return m


def values(m):
    return [p.detach().clone() for p in m.parameters()]


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", RECIPES)
def test_another_optimizer_is_refused_and_changes_nothing(name, update):
    m = after_backward(name)
    before = values(m)
    with pytest.raises(UserError, match=r" while its gradient waits .* with narrowgauge.AdamW, or drop") as e:
        UPDATES[update]([m[0].weight, m[2].weight])
    assert all(torch.equal(a, b) for a, b in zip(values(m), before, strict=True))
    assert name != "eco" or update != "SGD" or is_on_page(e.value)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_write_is_served_as_soon_as_an_optimizer_has_used_the_gradient(name, write):
    m = after_backward(name)
    with pytest.raises(UserError, match="while its gradient waits"), torch.no_grad():
        WRITES[write](m[0].weight)
    ng.AdamW(m.parameters(), name).step()
    with torch.no_grad():
        wide = nn.Parameter(m[0].weight.detach().clone())
        WRITES[write](wide)
        WRITES[write](m[0].weight)
    torch.testing.assert_close(m[0].weight.detach().clone(), wide.detach(), rtol=2.0**-3, atol=2e-3)


@pytest.mark.parametrize("name", RECIPES)
def test_a_copy_to_average_into_has_no_gradient(name):
    m = after_backward(name)
    averaged = copy.deepcopy(m)
    assert averaged[0].weight.grad is None
    assert m[0].weight.grad is not None
    with torch.no_grad():
        averaged[0].weight.lerp_(m[0].weight, 0.5)


def test_an_optimizer_that_compiles_its_step_is_refused():
    m = after_backward("bf16-sr")
    with pytest.raises(Exception, match=r"copy_ in compiled code cannot .*set_stance\('force_eager'\)"):
        torch.compile(lambda p: p.copy_(2 * p), backend="eager", fullgraph=True)(m[0].weight.detach())
