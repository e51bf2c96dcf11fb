"""What loops do with any optimizer: groups added later, copies, states of other groups and of torch."""

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


def stepped(optimizer, parameters, steps):
    for n in steps:
        g = torch.Generator().manual_seed(n)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()


def of_torchs(kind=torch.optim.AdamW, steps=4, **options):
    """Parameters, and their optimizer after some steps of two groups; one parameter never had a gradient."""
    torch.manual_seed(0)
    p, q, unused = (torch.nn.Parameter(torch.randn(64, 64)) for _ in range(3))
    optimizer = kind([{"params": [p], "lr": 1e-2}, {"params": [q, unused], "weight_decay": 0.3}], **options)
    stepped(optimizer, [p, q], range(steps))
    return [p, q, unused], optimizer


def ours(parameters, recipe="fp32"):
    p, *rest = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    return [p, *rest], ng.AdamW([{"params": [p]}, {"params": rest}], recipe)


@pytest.mark.parametrize("options", [{"fused": True}, {"betas": (0.8, 0.9), "eps": 1e-6}])
def test_it_goes_on_as_torchs_would_have(options):
    parameters, optimizer = of_torchs(**options)
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
    parameters, optimizer = of_torchs()
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


#: What a refusal says of the state of an optimizer of torch's, and how that is made.
OTHER_STATES = {
    "has amsgrad = True": {"amsgrad": True},
    "Adam with weight decay is not": {"kind": torch.optim.Adam},
    "another model or recipe: '0.m": {"kind": torch.optim.SGD, "momentum": 0.9},
}


@pytest.mark.parametrize("says", OTHER_STATES)
def test_another_state_is_refused_and_changes_nothing(says):
    _, optimizer = ours(of_torchs()[0])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UserError, match=says):
        optimizer.load_state_dict(of_torchs(**OTHER_STATES[says])[1].state_dict())
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(t, before["state"][key][name]) for name, t in state.items())
