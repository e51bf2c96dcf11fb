"""AdamW's kernel on narrow state against its reference in plain torch, and the optimizer with it and without.

All of it bit for bit: the reference's operations are torch's own on a CPU with vectors, which fuses the same
multiplies and adds on any such CPU, but for the elements behind the last whole vector; hence multiples of 16
wherever the digits are compared with torch's.
"""

from fractions import Fraction
from functools import partial

import pytest
import torch

import narrowgauge as ng
from kernels.common import INF, NAN, assert_same, normal, same_bits
from narrowgauge.formats import random_stream, stream_key
from narrowgauge.kernels import dispatch as where
from narrowgauge.kernels.adamw import Factors, adamw, fma, reference, supports
from narrowgauge.optim.adamw import adamw_update
from narrowgauge.optim.algorithm import UpdateBatch
from narrowgauge.quantization import QuantizedState, make_cast, state_of
from narrowgauge.quantization.state import quantized_state
from narrowgauge.recipes import recipe

E4M3 = {"cast": "e4m3", "power_of_two": True}
E5M2 = {"cast": "e5m2"}
SR = {"cast": "bf16", "rounding": "stochastic"}
CODES_SR = {"cast": "e4m3", "rounding": "stochastic"}
#: (weight, gradient, m, v, the weight with it if the first is a master)
WAYS = {
    "msamp-o1": ("fp16-scaled", E4M3, "fp32", "fp32", None),
    "msamp-o2": ("fp16-scaled", E4M3, E4M3, "fp16-scaled", None),
    "msamp-o3": ("fp16-scaled", E4M3, E4M3, "fp16-scaled", E4M3),
    "bf16-sr": (SR, SR, "fp32", "fp32", None),
    "16 bits": ("fp32", "bf16", "bf16", "fp16", None),
    "random codes": ("fp32", "fp16", CODES_SR, E5M2, CODES_SR),
    "random fp16": ({"cast": "fp16-scaled", "rounding": "stochastic"}, "fp32", "bf16", SR, SR),
}
like_torch = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="fuses no products and sums"
)
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SEED, STEP = 7, 3


def filled(numbers, cast, device):
    state = QuantizedState(numbers.shape, make_cast(cast), device)
    state.write(numbers.to(device))
    return state


def states(way, shape, device, scale=1.0):
    w, dw, m, v = (normal(*shape, seed=i) for i in range(4))
    numbers = (w * 0.02, dw * scale, m * scale, (v * scale).square(), w * 0.02)
    return [
        None if cast is None else filled(x, cast, device) for x, cast in zip(numbers, WAYS[way], strict=True)
    ]


def updated_by_reference(w, g, m, v, weight, factors):
    """The same state as `adamw` has to leave, written as the optimizer writes it."""
    numbers = reference(w.read(), g.read(), m.read(), v.read(), factors)
    for i, (state, x) in enumerate(zip((w, m, v, weight), (*numbers, numbers[0]), strict=True)):
        if state is not None:
            random = state.cast.rounding == "stochastic"
            x = w.read() if state is weight else x  # what the master holds
            state.write(x.clone(), random_stream(SEED, STEP, i, x.device) if random else None)


def updated_by_kernel(w, g, m, v, weight, factors):
    keys = {place: stream_key(SEED, STEP, i) for i, place in enumerate(("w", "m", "v", "weight"))}
    assert supports(w, g, m, v, weight)
    adamw(w, g, m, v, weight, factors, keys)


def stored(states):
    """Every bit that is stored."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return [t.view(bits[t.element_size()]) for s in states if s is not None for t in s.tensors.values()]


def read(states):
    return [s.read() for s in states if s is not None]


def updated_both_ways(make, factors, of=stored, times=1):
    """`make()` gives the same states twice: one is updated by the kernel, the other by the reference."""
    ours, plain = make(), make()
    for _ in range(times):
        updated_by_kernel(*ours, factors)
        updated_by_reference(*plain, factors)
        assert_same(of(ours), of(plain))
    return ours


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


@pytest.mark.tier("thorough", keep=("bf16-sr",))
@pytest.mark.parametrize("way", WAYS)
def test_the_kernel_is_its_reference(way, device):
    """Two programs of the first launch and five of the second, none of them full; and one."""
    for shape, betas in (((71, 137), (0.3, 0.6)), ((3,), (0.9, 0.95))):
        factors = Factors.of(OPTIONS | {"betas": betas}, STEP)
        updated_both_ways(lambda shape=shape: states(way, shape, device), factors, times=2)


def test_random_bits_meet_what_is_cut_off(device):
    """Where what bf16 cuts off is the random number, or next to it; with lr = 0 a weight stays as it is."""
    shape = torch.Size((60, 70))
    uniform = random_stream(SEED, STEP, 3).uniform(shape)
    ties = 0
    for less in (0, 1):
        bits = (0x3F80 << 16) + ((uniform * 2**16).int() - less).clamp(0)
        w = (torch.where(torch.arange(70) % 2 == 0, bits, bits | -(2**31))).view(torch.float32)
        ties += (uniform == (bits & 0xFFFF) * 2.0**-16).sum()
        kinds = (("fp32", w), ("fp16", w), ("bf16", w), ("fp32", w.abs()), (SR, w))
        factors = Factors.of(OPTIONS | {"lr": 0.0}, STEP)
        ours = updated_both_ways(lambda kinds=kinds: [filled(x, cast, device) for cast, x in kinds], factors)
        assert torch.equal(ours[0].read().cpu(), w)
    assert ties > 0


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("way", ["msamp-o3", "bf16-sr", "16 bits"])
def test_extreme_numbers_and_those_that_are_not_finite(way, device):
    """Squares that are subnormal, or infinite: then v is NaN from its scale on, in both. A number of the
    gradient, or of m, that is not finite."""
    for scale in (0.0, 2.0**-75, 2.0**-140, 2.0**55, 2.0**70):
        updated_both_ways(lambda s=scale: states(way, (5, 16), device, s), Factors.of(OPTIONS, 1), of=read)

    def make(place, bad):
        found = states(way, (5, 16), device)
        x = found[place].read().clone()
        x[2, 3] = bad
        found[place].write(x)
        return found

    for place in (1, 2):
        for bad in (NAN, INF, -INF):
            ours = updated_both_ways(partial(make, place, bad), Factors.of(OPTIONS, STEP), of=read)
            assert ours[0].read().isnan().any()


def test_what_it_takes_and_what_it_does_not(device):
    def at_rest(cast, **options):
        return QuantizedState(torch.Size((4, 256)), make_cast(cast), device, **options)

    for cast in ("fp32", "bf16", "fp16", SR, "fp16-scaled", E4M3, E5M2):
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


def test_state_in_the_memory_of_the_host_is_updated_in_copies(device, monkeypatch):
    """As on a GPU, whose memory is another one."""
    here, there = (states("msamp-o3", (8, 48), device) for _ in range(2))
    w, _, m, v, _ = there
    for state in (w, m, v):
        state.on_host = True
        state.move(torch.device(device))
    addresses = [t.data_ptr() for state in there for t in state.tensors.values()]
    monkeypatch.setattr(quantized_state, "is_gpu", lambda _: True)
    copies = w.on_device()["values"]
    assert copies.data_ptr() != w.tensors["values"].data_ptr()
    for ways in (here, there):
        updated_by_kernel(*ways, Factors.of(OPTIONS, STEP))
    assert_same(stored(here), stored(there))
    assert [t.data_ptr() for state in there for t in state.tensors.values()] == addresses


RECIPES = {
    "msamp-o1": {},
    "msamp-o2": {},
    "msamp-o3": {},
    "bf16-sr": {},
    "fp32": {"m": "bf16", "v": E5M2},
    "bf16": {"weight": "bf16", "master": "fp32", "m": CODES_SR, "v": SR},
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
    found = optimizer.tensors({p: n for n, p in model.named_parameters()})
    for n, p in model.named_parameters():
        found[n] = p.detach()
        for place in ("weight", "master"):
            stored = state_of(p).by_place().get(place) or QuantizedState(p.shape, make_cast("fp32"))
            found |= {f"{n}.{place}.{k}": t for k, t in stored.tensors.items()}
    return {n: t.float().cpu() for n, t in found.items()}


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
    assert ours.keys() == torchs.keys()
    for n, t in ours.items():
        assert same_bits(t, torchs[n]), n
