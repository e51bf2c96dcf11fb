"""What loops do with any optimizer: groups added later, copies, states of other groups."""

import copy

import pytest
import torch

import narrowgauge as ng
from narrowgauge.system.errors import UserError
from nn.own_loop import assert_same, batch, go_on, model, numbers_of, train


@pytest.mark.parametrize("cls", [ng.AdamW, ng.Muon])
def test_a_group_that_is_added_later_moves_as_one_of_the_first(cls):
    a, b = model("msamp-o2"), model("msamp-o2")
    groups = [{"params": list(layer.parameters())} for layer in (b[0], b[2])]
    at_once = cls([{"params": list(layer.parameters())} for layer in (a[0], a[2])], "msamp-o2", lr=1e-2)
    later = cls([groups[0]], "msamp-o2", lr=1e-2)
    later.add_param_group(groups[1])
    assert [g["algorithm"] for g in later.param_groups] == [g["algorithm"] for g in at_once.param_groups]
    assert_same(go_on(b, later, range(3)), go_on(a, at_once, range(3)))


def test_a_factor_of_the_learning_rate_holds_without_a_schedule_of_ours():
    groups = ng.parameter_groups(model("fp8"), 0.0, {"0.*": {"lr_factor": 0.5}})
    assert {g["lr_factor"]: g["lr"] for g in ng.AdamW(groups, lr=0.5).param_groups} == {0.5: 0.25, 1.0: 0.5}
    said = [group | {"lr": 2.0} for group in groups]
    assert {g["lr"] for g in ng.AdamW(said, lr=0.5).param_groups} == {2.0}


#: What is refused of a model's parameters, and the sentence.
MISTAKES = {
    "has amsgrad = True, which narrowgauge's": lambda m: ng.AdamW(
        [{"params": m.parameters(), "amsgrad": True}]
    ),
    r"is not a recipe; .* AdamW\(params, recipe=.*, lr=": lambda m: ng.AdamW(
        m.parameters(), torch.tensor(1e-3)
    ),
    "muon updates this weight, and the feedback formula is for AdamW": lambda m: ng.Muon(
        m.parameters(), "eco"
    ),
    r"'bloks.\*' matches no parameter": lambda m: ng.parameter_groups(
        m, 0.1, {"bloks.*": {"weight_decay": 0.0}}
    ),
    r"option of optimizer\.groups 'decay'": lambda m: ng.parameter_groups(m, 0.1, {"*": {"decay": 0.0}}),
}


@pytest.mark.parametrize("says", MISTAKES)
def test_what_nothing_serves_is_refused(says):
    with pytest.raises(UserError, match=says):
        MISTAKES[says](model("eco"))


def test_the_state_of_other_groups_is_refused_before_anything_changes():
    a, b, c = (torch.nn.Parameter(torch.ones(4)) for _ in range(3))
    saved = ng.AdamW([{"params": [a]}, {"params": [b, c]}], lr=1.0).state_dict()
    for groups in ([{"params": [a, b]}, {"params": [c]}], [{"params": [a, b, c]}]):
        optimizer = ng.AdamW(groups, lr=2.0)
        with pytest.raises(UserError, match=r"2 groups of \[1.*make the optimizer with the groups"):
            optimizer.load_state_dict(saved)
        assert {g["lr"] for g in optimizer.param_groups} == {2.0}


@pytest.mark.parametrize("recipe", ["bf16-sr", "msamp-o3"])
def test_a_copy_of_model_and_optimizer_goes_on_alike(recipe):
    m = model(recipe)
    optimizer = ng.AdamW(m.parameters(), recipe, lr=1e-2, seed=5)
    go_on(m, optimizer, range(3))
    its_copy, its_optimizer = copy.deepcopy((m, optimizer))
    assert_same(go_on(its_copy, its_optimizer, range(3)), go_on(m, optimizer, range(3)))


def test_a_closure_computes_the_gradients():
    m, other = model("fp8"), model("fp8")

    def closure():
        loss = m(batch()).square().mean()
        loss.backward()
        return loss

    loss = ng.AdamW(m.parameters(), lr=1e-2).step(closure)
    assert loss.item() == other(batch()).square().mean().item()
    assert_same(numbers_of(m), train(other, "fp32", numbers=(1,)))
