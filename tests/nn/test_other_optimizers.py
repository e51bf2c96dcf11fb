"""Who changes a narrow weight: this package's optimizers, and code that writes while no gradient waits. And
what another optimizer or a resume loses of a recipe: moments in casts, random bits, histories."""

import copy
import warnings

import pytest
import torch
from torch import nn, optim

import narrowgauge as ng
from narrowgauge.system.errors import UserError
from nn.own_loop import batch, go_on, is_on_page, model

RECIPES = ("bf16-sr", "msamp-o2", "msamp-o3", "eco")


UPDATES = {
    "AdamW": lambda p: optim.AdamW(p).step(),
    "AdamW, foreach": lambda p: optim.AdamW(p, foreach=True).step(),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9).step(),
}
WRITES = {
    "copy": lambda w: w.copy_(2 * w),
    "averaging": lambda w: w.lerp_(torch.ones_like(w), 0.5),
    "assignment": lambda w: setattr(w, "data", 2 * w.detach()),
}


def model_of(recipe, width=64):
    return model(recipe, width=width, keep=[])


def after_backward(name):
    """A model under a recipe whose gradients wait."""
    m = model_of(name)
    m(batch(1, 64)).square().mean().backward()
    return m


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", RECIPES)
def test_another_optimizer_is_refused_and_changes_nothing(name, update):
    m = after_backward(name)
    before = [p.detach().clone() for p in m.parameters()]
    with pytest.raises(UserError, match=r" while its gradient waits .* with narrowgauge.AdamW, or drop") as e:
        UPDATES[update]([m[0].weight, m[2].weight])
    assert all(map(torch.equal, m.parameters(), before))
    assert name != "eco" or update != "SGD" or is_on_page(e.value)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_write_is_served_as_soon_as_an_optimizer_has_used_the_gradient(name, write):
    m = after_backward(name)
    averaged = copy.deepcopy(m)
    assert averaged[0].weight.grad is None, "a copy to average into waits for nothing"
    with torch.no_grad():
        averaged[0].weight.lerp_(m[0].weight, 0.5)
        with pytest.raises(UserError, match="while its gradient waits"):
            WRITES[write](m[0].weight)
        ng.AdamW(m.parameters(), name).step()
        wide = nn.Parameter(m[0].weight.detach().clone())
        WRITES[write](wide)
        WRITES[write](m[0].weight)
    torch.testing.assert_close(m[0].weight.detach().clone(), wide.detach(), rtol=2.0**-3, atol=2e-3)


def trained(m, optimizer, steps, says_step=False):
    """The warnings of steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        go_on(m, optimizer, steps, says_step=says_step)
    return [str(w.message) for w in caught]


MOMENTS = "keeps moments in float32, which the recipe stores in 'coat': use narrowgauge.AdamW"
#: An optimizer over a recipe, the width of matrices, and whether it loses the recipe's moments.
OPTIMIZERS = {
    "AdamW of torch": ("coat", optim.AdamW, 64, True),
    "without the recipe": ("coat", ng.AdamW, 64, True),
    "SGD without moments": ("coat", optim.SGD, 64, False),
    "with the recipe": ("coat", lambda p: ng.AdamW(p, "coat"), 64, False),
    "no moments in casts": ("fp8", optim.AdamW, 64, False),
    "small matrices have wide moments": ("coat", optim.AdamW, 32, False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_loses_a_recipes_moments_is_named_once(name):
    recipe, make, width, is_lost = OPTIMIZERS[name]
    m = model_of(recipe, width)
    found = trained(m, make(m.parameters()), range(3))
    assert [MOMENTS in text for text in found] == [True] * is_lost


@pytest.mark.parametrize(
    ("recipe", "is_whole", "sets_step", "is_warned"),
    [
        ("nvfp4", False, False, True),
        ("fp8-delayed", True, False, False),
        ("nvfp4", False, True, False),  # bits follow from the step
        ("fp8", False, False, False),  # there are none
    ],
)
def test_a_resume_without_the_recipes_state_is_named_once(recipe, is_whole, sets_step, is_warned):
    m = model_of(recipe)
    optimizer = optim.AdamW(m.parameters())
    trained(m, optimizer, (1, 2), sets_step)
    again = model_of(recipe)  # it has heard of no step
    its_optimizer = optim.AdamW(again.parameters())
    if is_whole:
        ng.load_state_dict(again, its_optimizer, ng.state_dict(m, optimizer))
    else:
        again.load_state_dict(m.state_dict())
        its_optimizer.load_state_dict(optimizer.state_dict())
    said = trained(again, its_optimizer, range(3, 6), sets_step)
    assert ["random bits and histories start over" in text for text in said] == [True] * is_warned
    assert all("narrowgauge.load_state_dict" in text for text in said)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp4-ue5m3", "tetrajet2-outliers"])
def test_other_weights_are_multiplied_as_in_a_newly_converted_model(recipe):
    m, fresh = model_of(recipe), model_of(recipe)
    trained(m, ng.AdamW(m.parameters(), recipe), range(1, 4), says_step=True)
    larger = {key: 100 * t for key, t in m.state_dict().items()}
    for each in (m, fresh):
        each.load_state_dict(larger)
        ng.set_step(each, 0, 9, 0, 20, 15)
    assert torch.equal(m(batch(5, 64)), fresh(batch(5, 64)))


def test_an_optimizer_that_compiles_its_step_is_refused():
    m = after_backward("bf16-sr")
    with pytest.raises(Exception, match=r"copy_ in compiled code cannot .*set_stance\('force_eager'\)"):
        torch.compile(lambda p: p.copy_(2 * p), backend="eager", fullgraph=True)(m[0].weight.detach())
