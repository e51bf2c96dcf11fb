"""AdamW's kernel on narrow state, its reference (`test_twins` compares them), and the optimizer with either.

All of it bit for bit: the reference's operations are torch's own on a CPU with vectors, which fuses the same
multiplies and adds on any such CPU, but for the elements behind the last whole vector; hence multiples of 16
wherever the digits are compared with torch's.
"""

from fractions import Fraction

import pytest
import torch

import narrowgauge as ng
from kernels.common import INF, assert_same, normal
from narrowgauge.formats import random_stream, stream_key
from narrowgauge.kernels import dispatch as where
from narrowgauge.kernels.adamw import Factors, adamw, fma, reference, supports
from narrowgauge.optim.adamw import adamw_update
from narrowgauge.optim.optimizer import UpdateBatch
from narrowgauge.quantization import QuantizedState, make_cast, state_of
from narrowgauge.recipes import recipe
from narrowgauge.system.torch_compat import tree_leaves

SR = {"cast": "bf16", "rounding": "stochastic"}
like_torch = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="fuses no products and sums"
)
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SEED, STEP = 7, 3


def test_a_sum_of_products_is_rounded_once():
    a, b, which = (normal(3000, seed=i) for i in range(3))
    c = -(a * b) * (1 + (3 * which).round() * 2.0**-20)
    # 1 + 2^-23 + 2^-24 and a hair below or above: fp64 alone cannot see the hair, and would round to even
    tie = torch.tensor([[1 + 2.0**-12, 1 + 2.0**-12, s] for s in (2.0**-60, -(2.0**-60), 0.0)]).T
    a, b, c = torch.cat([a, tie[0]]), torch.cat([b, tie[1]]), torch.cat([c, tie[2]])
    for x, y, z, ours in zip(a.tolist(), b.tolist(), c.tolist(), fma(a, b, c).tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        t = torch.tensor(ours)
        for other in (torch.nextafter(t, t + 1), torch.nextafter(t, t - 1)):
            assert abs(exact - Fraction(ours)) <= abs(exact - Fraction(other.item())), (x, y, z)
    low, high = fma(*tie)[[1, 0]].tolist()
    assert low < high  # on the two sides of the tie
    assert fma(torch.tensor(INF), torch.tensor(1.0), torch.tensor(1.0)).item() == INF


@like_torch
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.5, 0.5), (0.1, 0.2), (0.0, 0.0)])
def test_the_reference_is_torchs_fused_update(betas):
    w, m, v, steps = normal(256, seed=2), torch.zeros(256), torch.zeros(256), torch.zeros(())
    ours = w.clone(), m.clone(), v.clone()
    for step in (1, 2, 3, 4):
        dw = normal(256, seed=step) * 10.0 ** (3 * normal(256, seed=9 + step)).round().clamp(-12, 5)
        options = OPTIONS | {"betas": betas, "lr": 1e-2 / step}
        ours = reference(ours[0], dw, *ours[1:], Factors.of(options, step))
        adamw_update(UpdateBatch([w], [dw], {"m": [m], "v": [v]}, [steps], [None]), options)
        assert_same(ours, (w, m, v))


def test_random_bits_meet_what_is_cut_off(device):
    """Where what bf16 cuts off is the random number, or next to it; with lr = 0 a weight stays as it is."""
    shape = torch.Size((60, 70))
    stream, uniform = random_stream(SEED, STEP, 3), random_stream(SEED, STEP, 3).uniform(shape)
    factors, ties = Factors.of(OPTIONS | {"lr": 0.0}, STEP), 0
    for less in (0, 1):
        bits = (0x3F80 << 16) + ((uniform * 2**16).int() - less).clamp(0)
        w = (torch.where(torch.arange(70) % 2 == 0, bits, bits | -(2**31))).view(torch.float32)
        ties += (uniform == (bits & 0xFFFF) * 2.0**-16).sum()
        states = [QuantizedState(shape, make_cast(c), device) for c in ("fp32", "fp16", "bf16", "fp32", SR)]
        for state in states:
            state.write(w.abs().to(device) if state is states[3] else w.to(device))
        adamw(*states, factors, {"weight": stream_key(SEED, STEP, 3)})
        assert torch.equal(states[0].read().cpu(), w)
        found = states[4].read()
        states[4].write(w.to(device), stream)
        assert torch.equal(found, states[4].read())
    assert ties > 0


def test_what_it_takes_and_what_it_does_not(device):
    def at_rest(cast, **options):
        return QuantizedState(torch.Size((4, 256)), make_cast(cast), device, **options)

    for cast in ("fp32", "bf16", "fp16", SR, "fp16-scaled", "e4m3", "e5m2"):
        assert supports(at_rest(cast), None), cast
    for cast in ("coat", "dynamic8", "fp8-1x128", "mxfp8", {"cast": "fp16", "rounding": "stochastic"}):
        assert not supports(at_rest("fp32"), at_rest(cast)), cast
    assert supports(at_rest("fp32", on_host=True)), "a copy of it"
    assert not supports(torch.zeros(4, 8, device=device).T)
    assert not supports(torch.zeros(0, device=device))
    assert not supports(torch.zeros(4, dtype=torch.float64, device=device))
    shown = at_rest("bf16")
    shown.gauge = lambda x, state: None
    assert not supports(shown)


RECIPES = {
    "msamp-o1": {},
    "msamp-o2": {},
    "msamp-o3": {},
    "bf16-sr": {},
    "fp32": {"m": "bf16", "v": "e5m2"},
    "bf16": {"weight": "bf16", "master": "fp32", "m": {"cast": "e4m3", "rounding": "stochastic"}, "v": SR},
}


def trained(name, device, steps=4):
    """All that is stored after some steps: gradients of two sums, clipped; only matrices decay."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(80, 64), torch.nn.Linear(64, 16, bias=False)).to(device)
    r = recipe(name).with_places(RECIPES[name])
    model = ng.convert(model, r, keep=[])
    optimizer = ng.AdamW(ng.optim.parameter_groups(model, 0.1), r, betas=(0.9, 0.95), seed=5)
    g = torch.Generator().manual_seed(1)
    for n in range(steps):
        ng.optim.set_learning_rate(optimizer, 1e-2 / (n + 1))
        optimizer.zero_grad()
        for p in model.parameters():
            dw = (torch.randn(p.shape, generator=g) * 10.0**-n).to(device)
            if (narrow := state_of(p).gradient) is not None:
                narrow.add(dw, random_stream(1, n, 2, device))
                narrow.add(dw.flip(0), random_stream(1, n, 3, device))
            else:
                p.grad = dw.to(p.dtype)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    stored = tree_leaves(ng.state_dict(model, optimizer))
    return [t.float().cpu() for t in stored if isinstance(t, torch.Tensor)]


@pytest.mark.tier("thorough")
@like_torch
@pytest.mark.parametrize("name", RECIPES)
def test_the_optimizer_with_kernels_is_torchs_to_the_last_digit(name, device, monkeypatch):
    from narrowgauge.kernels.triton import adamw as on_gpu

    ran, launch = [], on_gpu.launch_update
    monkeypatch.setattr(on_gpu, "launch_update", lambda *args: ran.append(args[0][0].shape) or launch(*args))
    ours = trained(name, device)
    assert ran.count((64, 80)) == 4
    monkeypatch.setattr(where, "can_compile", lambda: False)
    ran.clear()
    torchs = trained(name, torch.device("cpu"))
    assert not ran
    assert_same(ours, torchs)
