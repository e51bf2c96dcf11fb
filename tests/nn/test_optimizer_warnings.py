"""What a loop loses without a word of its own: moments in casts, random bits, histories of other weights."""

import warnings

import pytest
import torch
from torch import nn

import narrowgauge as ng


def model_of(recipe, width=64):
    torch.manual_seed(0)
    return ng.convert(
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)), recipe, keep=[]
    )


def batch(n, width=64):
    return torch.randn(16, width, generator=torch.Generator().manual_seed(n))


def trained(m, optimizer, steps, sets_step=False):
    for n in steps:
        if sets_step:
            ng.set_step(m, 0, n + 1, 0, 20, 15)
        m(batch(n)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def said(run):
    """The warnings of a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught]


MOMENTS = "keeps moments in float32, which the recipe stores in 'coat': use narrowgauge.AdamW"
#: A recipe, an optimizer over it, and whether it loses the recipe's moments.
OPTIMIZERS = {
    "AdamW of torch": ("coat", lambda p: torch.optim.AdamW(p), True),
    "SGD with momentum": ("coat", lambda p: torch.optim.SGD(p, momentum=0.9), True),
    "without the recipe": ("coat", lambda p: ng.AdamW(p), True),
    "SGD without moments": ("coat", lambda p: torch.optim.SGD(p), False),
    "with the recipe": ("coat", lambda p: ng.AdamW(p, "coat"), False),
    "Muon with the recipe": ("coat", lambda p: ng.Muon(p, "coat"), False),
    "no moments in casts": ("fp8", lambda p: torch.optim.AdamW(p), False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_loses_a_recipes_moments_is_named_once(name):
    recipe, make, is_lost = OPTIMIZERS[name]
    m = model_of(recipe)
    optimizer = make(m.parameters())
    found = said(lambda: trained(m, optimizer, range(3)))
    assert [MOMENTS in text for text in found] == [True] * is_lost


def test_small_matrices_have_no_narrow_moments_to_lose():
    m = model_of("coat", width=32)
    optimizer = torch.optim.AdamW(m.parameters())
    m(batch(0, 32)).square().mean().backward()
    assert not said(optimizer.step)


RESTART = "random bits and histories start over"


def resumed(recipe, save, load, sets_step=False):
    """The warnings of a loop that goes on from a state of torch's AdamW."""
    m = model_of(recipe)
    optimizer = torch.optim.AdamW(m.parameters())
    trained(m, optimizer, range(2), sets_step)
    state = save(m, optimizer)
    again = model_of(recipe)
    its_optimizer = torch.optim.AdamW(again.parameters())
    load(again, its_optimizer, state)
    return said(lambda: trained(again, its_optimizer, range(2, 5), sets_step))


def save_both(m, optimizer):
    return m.state_dict(), optimizer.state_dict()


def load_both(m, optimizer, state):
    m.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-delayed"])
def test_a_resume_without_the_recipes_state_is_named_once(recipe):
    (text,) = resumed(recipe, save_both, load_both)
    assert RESTART in text
    assert "narrowgauge.load_state_dict" in text


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-delayed"])
def test_a_whole_resume_warns_of_nothing(recipe):
    assert not resumed(recipe, ng.state_dict, ng.load_state_dict)


def test_bits_that_follow_from_the_step_or_none_at_all_warn_of_nothing():
    assert not resumed("nvfp4", save_both, load_both, sets_step=True)
    assert not resumed("fp8", save_both, load_both)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp4-ue5m3", "tetrajet2-outliers"])
def test_other_weights_are_multiplied_as_in_a_newly_converted_model(recipe):
    m = model_of(recipe)
    trained(m, ng.AdamW(m.parameters(), recipe), range(3), sets_step=True)
    larger = {key: 100 * t for key, t in m.state_dict().items()}
    m.load_state_dict(larger)
    fresh = model_of(recipe)
    fresh.load_state_dict(larger)
    for each in (m, fresh):
        ng.set_step(each, 0, 9, 0, 20, 15)
    assert torch.equal(m(batch(5)), fresh(batch(5)))


def test_the_same_weights_and_the_state_of_a_resume_keep_histories():
    m = model_of("fp8-delayed")
    optimizer = ng.AdamW(m.parameters(), "fp8-delayed")
    trained(m, optimizer, range(3))
    scale = m[0].histories["fprop.w"].scale.clone()
    assert scale != 1
    m.load_state_dict(m.state_dict())
    assert m[0].histories["fprop.w"].scale == scale
    again = model_of("fp8-delayed")
    its_optimizer = ng.AdamW(again.parameters(), "fp8-delayed")
    its_optimizer.load_state_dict(optimizer.state_dict())  # before its model, as `set_state_dict` loads them
    again.load_state_dict(m.state_dict())
    assert again[0].histories["fprop.w"].scale == scale
