"""The rounding error of weights without a master, in the first moment: as by hand, worth it, and refused."""

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.nn import convert
from narrowgauge.optim import AdamW, Muon
from narrowgauge.quantization import state_of
from narrowgauge.recipes import parse_recipe, recipe
from narrowgauge.system.errors import UserError

FED = 'weight = {cast = "e4m3", feedback = "momentum"}'
LR, BETAS, EPS, DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1
f = np.float32


def converted(text, w):
    layer = torch.nn.Linear(*reversed(w.shape), bias=False)
    layer.weight.data = w.clone()
    model = convert(torch.nn.Sequential(layer), parse_recipe(text, "mine"), keep=[])
    return model, AdamW(model.parameters(), model[0].recipe, LR, BETAS, EPS, DECAY)


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
    model, optimizer = converted(FED, torch.from_numpy(w))
    (p,) = model.parameters()
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


def test_another_step_than_adamws_is_refused():
    model = convert(torch.nn.Sequential(torch.nn.Linear(96, 64)), "eco", keep=[])
    with pytest.raises(UserError, match="muon updates this weight, and the feedback formula is for AdamW"):
        Muon(model.parameters(), recipe("eco"))
