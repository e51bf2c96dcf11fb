"""AdamW on state in any numbers: torch's digits in fp32, near them in low precision, bits that come back."""

import math
from itertools import combinations

import pytest
import torch

import narrowgauge as ng
from narrowgauge.nn import set_step
from narrowgauge.optim import AdamW, parameter_groups
from narrowgauge.quantization import make_cast, state_of
from narrowgauge.recipes import recipe
from nn.own_loop import assert_same, batch, go_on, model

BY_CHANCE, POW2 = {"cast": "bf16", "rounding": "stochastic"}, {"cast": "e4m3", "power_of_two": True}
STATES = ["fp32", "bf16", BY_CHANCE, "fp16-scaled", POW2, "fp8-1x128", "coat", "dynamic8"]


def test_in_fp32_it_is_torchs_adamw_to_the_last_digit():
    ours, theirs = model("fp32"), model("fp32")
    options = {"lr": 1e-2, "betas": (0.9, 0.95)}
    optimizer = AdamW(parameter_groups(ours, 0.1), **options)
    its_optimizer = torch.optim.AdamW(parameter_groups(theirs, 0.1), fused=True, **options)
    assert_same(go_on(ours, optimizer, range(5)), go_on(theirs, its_optimizer, range(5)))


@pytest.mark.parametrize(
    ("m", "v"), [*zip(STATES, STATES, strict=True), *zip(STATES, STATES[3:], strict=False)]
)
def test_narrow_moments_stay_near_torchs_update(m, v):
    """MS-AMP's case: weight decay 1e-3, learning rate 1e-3, 4 steps; here gradients within two binades."""
    r = recipe("fp32").with_places({"m": m, "v": v})
    ours, theirs = model("fp32", width=80), model("fp32", width=80)
    a = AdamW(ours.parameters(), r, lr=1e-3, weight_decay=1e-3)
    b = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=1e-3)
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            size = torch.rand(p.shape, generator=g) * 1.5 + 0.5
            p.grad = q.grad = size * (torch.rand(p.shape, generator=g) - 0.3).sign()
        a.step()
        b.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (p - q).abs().max() <= 3e-4
        found = [a.state[p][place].cast.name for place in ("m", "v")]
        assert found == ([make_cast(m).name, make_cast(v).name] if p.numel() >= 4096 else ["fp32", "fp32"])


STATE_RECIPES = ["bf16-sr", "msamp-o1", "msamp-o2", "msamp-o3", "coat"]


class TestClipping:
    @pytest.mark.parametrize("max_norm", [1e-3, 1e9])
    def test_fp32_is_torchs(self, max_norm):
        ours, theirs = model("fp32"), model("fp32")
        for m in (ours, theirs):
            m(batch()).square().mean().backward()
        norm = AdamW(ours.parameters()).clip_grad_norm_(max_norm)
        torch.testing.assert_close(
            norm, torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm), rtol=3e-7, atol=0
        )
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=5e-7, atol=0)

    @pytest.mark.parametrize("name", STATE_RECIPES)
    def test_narrow_gradients_are_clipped_and_their_norm_is_fp32s(self, name):
        norms = {}
        for r in ("bf16", name):
            m = model(r, width=80)
            set_step(m, 0, 1, 0)
            x = torch.randn(32, 80, generator=torch.Generator().manual_seed(0))
            m(x).square().sum().backward()
            optimizer = AdamW(m.parameters(), r)
            norms[r] = optimizer.clip_grad_norm_(0.5).item()
            assert optimizer.clip_grad_norm_(0.5).item() == pytest.approx(0.5, rel=1e-4)
        assert norms[name] == pytest.approx(norms["bf16"], rel=0.01)
        assert norms[name] > 10

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    @pytest.mark.parametrize("name", ["fp32", "msamp-o1", "msamp-o2", "msamp-o3"])
    def test_a_gradient_that_is_not_finite_shows_in_the_norm(self, name, bad):
        m = model(name, width=80)
        dy = torch.ones(4, 80)
        dy[2, 3] = bad
        m(torch.ones(4, 80)).backward(dy)
        assert not AdamW(m.parameters(), name).clip_grad_norm_(1.0).isfinite()


def test_each_place_of_each_parameter_is_rounded_with_bits_of_its_own():
    """Weight and master, and moments that are equal, are the same values before they are rounded."""
    rounded = {"cast": "bf16", "rounding": "stochastic"}
    r = recipe("bf16").with_places(dict.fromkeys(("weight", "master", "m", "v"), rounded))
    layers = ng.convert(
        torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(2)), r, keep=[]
    )
    optimizer = AdamW(layers.parameters(), r, lr=0.1, betas=(0.9, 0.9))
    sum(layer(torch.eye(64)).sum() for layer in layers).backward()  # each gradient is 1, so that m = v
    optimizer.step()
    moments = [m.read() for p in layers.parameters() for m in optimizer.moments(p).values()]
    for one, other in combinations(moments, 2):
        assert 0.1 < (one != other).float().mean() < 0.9
    state = state_of(layers[0].weight)
    assert torch.equal(state.weight.read(), state.master.read())  # rounded already
