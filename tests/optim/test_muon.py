"""Muon against torch's own, and on narrow state."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.optim import Muon, parameter_groups
from narrowgauge.recipes import recipe
from narrowgauge.trainer.models import Transformer, model_config


def matrices(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in ((96, 64), (64, 64), (48, 128))]


def give_gradients(parameters, n):
    g = torch.Generator().manual_seed(n)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=g)


def test_it_is_torchs_muon_to_the_last_digit():
    ours, theirs = matrices(), matrices()
    a = Muon(ours, lr=0.02, weight_decay=0.1)
    b = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for n in range(5):
        for parameters, optimizer in ((ours, a), (theirs, b)):
            give_gradients(parameters, n)
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_vectors_and_what_is_said_move_by_adamw():
    p, q, r = (torch.nn.Parameter(torch.ones(shape)) for shape in ((8, 8), (8,), (4, 4)))
    optimizer = Muon([{"params": [p, q]}, {"params": [r], "algorithm": "adamw"}])
    found = [(g["algorithm"], g["params"]) for g in optimizer.param_groups]
    assert found == [("muon", [p]), ("adamw", [q]), ("adamw", [r])]
    assert [set(optimizer.moments(each)) for each in (p, q)] == [{"m"}, {"m", "v"}]
    model = Transformer(model_config("gpt2-debug"))
    by = {g["algorithm"]: g["params"] for g in parameter_groups(model, 0.1, muon=True) if g["weight_decay"]}
    hidden = {n for n, p in model.named_parameters() if any(p is q for q in by["muon"])}
    assert hidden == {n for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2}


@pytest.mark.parametrize("m", ["e4m3", "bf16", "dynamic8", "coat"])
def test_a_narrow_momentum_stays_near(m):
    def after(r):
        parameters = matrices()
        optimizer = Muon(parameters, r, lr=1e-3, weight_decay=0.0)
        for n in range(4):
            give_gradients(parameters, n)
            optimizer.step()
        return torch.cat(
            [(p.detach() - q.detach()).flatten() for p, q in zip(parameters, matrices(), strict=True)]
        )

    wide, narrow = after("fp32"), after(recipe("fp32").with_places({"m": m}))
    assert not torch.equal(wide, narrow)
    assert (narrow - wide).norm() < 0.1 * wide.norm()


def test_groups_by_pattern():
    model = Transformer(model_config("gpt2-debug"))
    patterns = {"*.bias": {"lr_factor": 2.0}, "embedding.*": {"weight_decay": 0.0, "lr_factor": 0.5}}
    groups = parameter_groups(model, 0.1, patterns)
    options = {
        n: (g["weight_decay"], g["lr_factor"])
        for g in groups
        for n, p in model.named_parameters()
        if any(p is q for q in g["params"])
    }
    assert options["embedding.weight"] == (0.0, 0.5)
    assert options["blocks.0.up.weight"] == (0.1, 1.0)
    assert options["blocks.0.up.bias"] == (0.0, 2.0)
    optimizer = ng.AdamW(groups)
    ng.optim.set_learning_rate(optimizer, 1e-3)
    assert {g["lr"] for g in optimizer.param_groups} == {1e-3, 2e-3, 5e-4}
