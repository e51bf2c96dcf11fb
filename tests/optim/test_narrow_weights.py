"""Weights in low precision: their rounding error fed back, what no step moves, and a step's memory."""

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.nn import convert
from narrowgauge.optim import AdamW
from narrowgauge.quantization import state_of
from narrowgauge.recipes import parse_recipe, recipe, recipe_names
from narrowgauge.trainer.simulate.recorder import Recorder
from nn.own_loop import model

FED = 'weight = {cast = "e4m3", feedback = "momentum"}'
LR, BETAS, EPS, DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1
f = np.float32
NARROW = [name for name in recipe_names() if recipe(name).state["weight"].name != "fp32"]
#: Other pairs of a weight and its master than those of recipes that ship.
PAIRS = {
    "16 bits over 16 bits": {"weight": "bf16", "master": "fp16-scaled"},
    "blocks over 16 bits": {"weight": "fp8-1x128", "master": "bf16"},
}
RECIPES = {name: name for name in NARROW} | {
    name: recipe("msamp-o3").with_places(places) for name, places in PAIRS.items()
}
SIZE = 64  # of square matrices, large enough for narrow moments


def converted(text, w):
    layer = torch.nn.Linear(*reversed(w.shape), bias=False)
    layer.weight.data = w.clone()
    m = convert(torch.nn.Sequential(layer), parse_recipe(text, "mine"), keep=[])
    return m, AdamW(m.parameters(), m[0].recipe, LR, BETAS, EPS, DECAY)


def by_hand(w, gradients):
    """(weight, m) after some steps, element by element in float32 where the optimizer has float32."""
    w = ng.quantize(torch.from_numpy(w), "e4m3").dequantize().numpy()
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        m = (m + (g - m) * f(1 - BETAS[0])).astype(f)
        v = (v * f(BETAS[1]) + g * g * f(1 - BETAS[1])).astype(f)
        root = np.sqrt(v) / f((1 - BETAS[1] ** t) ** 0.5) + f(EPS)
        wide = (w * f(1 - LR * DECAY) - m * f(LR / (1 - BETAS[0] ** t)) / root).astype(f)
        w = ng.quantize(torch.from_numpy(wide), "e4m3").dequantize().numpy()
        m = m + (wide - w) * root * f((1 - BETAS[0] ** t) / LR * (1 - 1 / BETAS[0]))
    return w, m


def test_as_by_hand():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((64, 96)).astype(f)
    gradients = [(1e-2 * rng.standard_normal(w.shape)).astype(f) for _ in range(4)]
    m, optimizer = converted(FED, torch.from_numpy(w))
    (p,) = m.parameters()
    for g in gradients:
        state_of(p).gradient.replace(torch.from_numpy(g))
        optimizer.step()
    expected_w, expected_m = by_hand(w, gradients)
    got = state_of(p).weight.read().numpy()
    assert (got != expected_w).mean() < 1e-3  # where a last bit falls on the other side of a tie
    same = got == expected_w
    m = optimizer.moments(p)["m"].read().numpy()
    scale = np.abs(expected_m).mean()
    assert (np.abs(m - expected_m)[same] / scale).mean() < 1e-5


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


def peak(act):
    """The most bytes that are alive at once, of those that a call allocates."""
    recorder = Recorder("cpu")
    with recorder:
        act()
    return recorder.live.peak


@pytest.mark.parametrize("name", ["msamp-o1", "msamp-o2", "msamp-o3", "coat", "eco"])
def test_a_step_over_many_weights_needs_the_memory_of_one(name, monkeypatch):
    monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")

    def peak_of_a_step(layers):
        m = torch.nn.Sequential(*[torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(layers)])
        m = convert(m, name, keep=[])
        optimizer = AdamW(m.parameters(), name)
        m(torch.ones(16, SIZE)).sum().backward()
        return peak(optimizer.step)

    assert peak_of_a_step(4) <= peak_of_a_step(1) + SIZE * SIZE
