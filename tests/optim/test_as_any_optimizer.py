"""What loops do with any optimizer: groups added later, closures, copies, states of other groups."""

import copy

import pytest
import torch

import narrowgauge as ng
from narrowgauge.system.errors import UserError


def model_of(recipe):
    torch.manual_seed(0)
    return ng.convert(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), recipe)


def train(model, optimizer, steps=3):
    for n in range(steps):
        model(torch.randn(8, 64, generator=torch.Generator().manual_seed(n))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def assert_same(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("cls", [ng.AdamW, ng.Muon])
def test_a_group_that_is_added_later_moves_as_one_of_the_first(cls):
    a, b = model_of("msamp-o2"), model_of("msamp-o2")
    groups = [{"params": list(layer.parameters())} for layer in b]
    at_once = cls([{"params": list(layer.parameters())} for layer in a], "msamp-o2", lr=1e-2)
    later = cls([groups[0]], "msamp-o2", lr=1e-2)
    later.add_param_group(groups[1])
    assert [g["algorithm"] for g in later.param_groups] == [g["algorithm"] for g in at_once.param_groups]
    assert_same(train(b, later), train(a, at_once))


def test_a_factor_of_the_learning_rate_holds_without_a_schedule_of_ours():
    model = model_of("fp8")
    groups = ng.parameter_groups(model, 0.0, {"0.*": {"lr_factor": 0.5}})
    assert {g["lr_factor"]: g["lr"] for g in ng.AdamW(groups, lr=0.5).param_groups} == {0.5: 0.25, 1.0: 0.5}
    said = [group | {"lr": 2.0} for group in groups]
    assert {g["lr"] for g in ng.AdamW(said, lr=0.5).param_groups} == {2.0}


TENSOR = torch.tensor(1e-3)
#: What an optimizer is made with, and the refusal.
MISTAKES = [
    (lambda ps: ng.AdamW([{"params": ps, "amsgrad": True}]), "has amsgrad = True, which narrowgauge's"),
    (lambda ps: ng.AdamW(ps, 1e-3), r"is not a recipe; .* AdamW\(params, recipe=.*, lr="),
    (lambda ps: ng.AdamW(ps, TENSOR), r"is not a recipe; .* AdamW\(params, recipe=.*, lr="),
]


@pytest.mark.parametrize(("make", "says"), MISTAKES)
def test_what_nothing_serves_is_refused(make, says):
    with pytest.raises(UserError, match=says):
        make(model_of("fp8").parameters())


@pytest.mark.parametrize("recipe", ["bf16-sr", "msamp-o3"])
def test_a_copy_of_model_and_optimizer_goes_on_alike(recipe):
    model = model_of(recipe)
    optimizer = ng.AdamW(model.parameters(), recipe, lr=1e-2, seed=5)
    train(model, optimizer)
    its_copy, its_optimizer = copy.deepcopy((model, optimizer))
    assert_same(train(its_copy, its_optimizer), train(model, optimizer))


def test_the_state_of_other_groups_is_refused_before_anything_changes():
    a, b, c = (torch.nn.Parameter(torch.ones(4)) for _ in range(3))
    saved = ng.AdamW([{"params": [a]}, {"params": [b, c]}], lr=1.0).state_dict()
    for groups in ([{"params": [a, b]}, {"params": [c]}], [{"params": [a, b, c]}]):
        optimizer = ng.AdamW(groups, lr=2.0)
        with pytest.raises(UserError, match=r"2 groups of \[1.*make the optimizer with the groups"):
            optimizer.load_state_dict(saved)
        assert {g["lr"] for g in optimizer.param_groups} == {2.0}
