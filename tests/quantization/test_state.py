"""State in low precision: what is read is what was written, rounded once; bytes; memory allocated once."""

import itertools
import math

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.quantization import (
    QuantizedState,
    ShardAxis,
    TensorShard,
    cast_names,
    ensure_state,
    full_axis,
    make_cast,
    state_cast_names,
)
from narrowgauge.quantization.state import quantized_state
from narrowgauge.quantization.state.gradient_state import PreScale, applied, next_mu
from narrowgauge.quantization.state.parameter_state import SMALLEST_NARROW, is_large
from narrowgauge.quantization.state.quantized_state import code_values, to_codes
from nn.own_loop import through_a_file

ROWS, COLUMNS = 48, 384
ALL = [*cast_names(), *state_cast_names()]
E5M3 = {"element": "e2m1", "block": 16, "scale": "e5m3", "tensor_scale": "tensor"}


def at_rest(cast, x):
    state = QuantizedState(x.shape, make_cast(cast))
    state.write(x)
    return state


def stored(x, *casts):
    """What is read back of a tensor that was stored in one cast after the other."""
    for cast in casts:
        x = at_rest(cast, x).read()
    return x


def numbers(seed=0):
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) * 1e-3


@pytest.mark.parametrize("name", ALL)
def test_it_begins_with_zeros_is_allocated_once_and_read_as_it_was_written(name):
    """Contiguous where blocks are ragged as well: torch's fused optimizers walk through memory."""
    x = numbers()[:, :80].contiguous()
    x = x.abs() if "unsigned" in name else x
    state = QuantizedState(x.shape, make_cast(name))
    assert not state.read().any()
    before = {k: t.data_ptr() for k, t in state.tensors.items()}
    state.write(x)
    assert {k: t.data_ptr() for k, t in state.tensors.items()} == before
    assert state.read().is_contiguous()
    assert state.read().shape == x.shape
    assert (state.read() - x).norm() < 0.2 * x.norm()
    for bad in (math.nan, math.inf, -math.inf):
        state.write(x.index_put((torch.tensor(5), torch.tensor(40)), torch.tensor(bad)))
        assert not state.read()[5, 40].isfinite()


@pytest.mark.parametrize("cast", [*(n for n in cast_names() if make_cast(n).is_scaled), E5M3], ids=str)
def test_codes_are_those_of_quantize(cast):
    x, c = numbers(), make_cast(cast)
    q, state = ng.quantize(x, c), at_rest(cast, x)
    assert torch.equal(state.read(), q.dequantize())
    scale_bytes = {"fp32": 4, "bf16": 2}.get(c.scale, 1) * q.scales.numel()
    scale_bytes += 4 if c.tensor_scale == "tensor" else 0
    assert sum(t.nbytes for t in state.tensors.values()) == x.numel() * c.element.bits // 8 + scale_bytes


def coat_by_hand(block):
    """COAT's formulas on one block, in float64, but for the rounding to E4M3."""
    magnitudes = np.abs(block[block != 0])
    largest, smallest = magnitudes.max(), magnitudes.min()
    k = math.floor(math.log2(448**2 / 2) / math.log2(largest / smallest) * 16) / 16
    c = math.sqrt(largest * smallest)
    stretched = np.sign(block) * (np.abs(block) / c) ** k
    scaled = torch.from_numpy(stretched * (448 / np.abs(stretched).max())).float()
    rounded = ng.round_to(scaled, "e4m3").double().numpy() * np.abs(stretched).max() / 448
    return np.sign(rounded) * np.abs(rounded) ** (1 / k) * c


def test_expansion_of_the_range_is_the_papers():
    x = numbers().square() * 1e-3
    x[3, :50] = 0
    got = stored(x, "coat")
    for row, start in itertools.product(range(0, ROWS, 7), range(0, COLUMNS, 128)):
        block = slice(start, start + 128)
        hand = coat_by_hand(x[row, block].double().numpy())
        # a code may differ where float32 and float64 fall on different sides of a tie
        assert np.isclose(got[row, block], hand, rtol=1e-4, atol=0).mean() > 0.97
        np.testing.assert_allclose(got[row, block], hand, rtol=0.13, atol=1e-12)
    x = numbers()
    assert (stored(x, "coat") - x).norm() < 0.6 * (stored(x, "fp8-1x128") - x).norm()
    assert (stored(x.square(), "fp8-1x128") == 0).any()
    assert (stored(x.square(), "coat") > 0).all()
    for value in (0.0, -3.0, 2.0**-126):
        same = torch.full((2, 128), value)
        torch.testing.assert_close(stored(same, "coat"), same, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["dynamic", "dynamic-unsigned"])
def test_every_number_takes_the_nearest_code_of_the_map(name):
    values = np.array(code_values(name))
    assert len(set(values)) == 256
    assert values[-1] == 1
    assert values.tolist().index(0) == (0 if "unsigned" in name else 127)
    assert values[values > 0].min() == pytest.approx(0.55e-6 if name == "dynamic" else 0.325e-6)
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    x = np.concatenate([middles, np.nextafter(middles, 2), np.nextafter(middles, -2), values])
    x = np.concatenate([x, np.random.default_rng(0).uniform(-1, 1, 5000)]).astype(np.float32)
    lower = np.argmin(np.abs(x.astype(np.float64)[:, None] - values), axis=1)  # the first of two
    assert (to_codes(torch.from_numpy(x), name).numpy() == lower).all()


def test_the_map_is_torchaos():
    quant_utils = pytest.importorskip("torchao.optim.quant_utils", reason="torchao is not installed")
    for name in ("dynamic", "dynamic-unsigned"):
        theirs = torch.tensor(quant_utils.create_dynamic_map(signed=name == "dynamic"))
        torch.testing.assert_close(torch.tensor(code_values(name)), theirs, rtol=1e-6, atol=0)


def test_copies_from_the_host_are_read_only_as_long_as_nobody_writes_there(monkeypatch):
    """A checkpoint that is loaded writes to the stored tensors themselves."""
    monkeypatch.setattr(quantized_state, "is_gpu", lambda _: True)
    state = QuantizedState(torch.Size((4,)), make_cast("fp32"), on_host=True)
    changes = {
        2: lambda: state.write(torch.full((4,), 2.0)),
        6: lambda: state.scale_by(torch.tensor(3.0)),
        5: lambda: state.tensors["values"].fill_(5),
        7: lambda: state.keep([torch.full((4,), 7.0)]),
    }
    for number, change in changes.items():
        state.fetch()
        change()
        assert state.read().tolist() == [number] * 4
    state.fetch()
    assert state.read() is not state.tensors["values"]


def test_only_large_matrices_have_narrow_moments():
    """The size of the global tensor decides, not that of a shard."""
    sizes = {(SMALLEST_NARROW,): False, (2, SMALLEST_NARROW // 2): True, (2, SMALLEST_NARROW // 2 - 1): False}
    assert {size: is_large(torch.nn.Parameter(torch.ones(size))) for size in sizes} == sizes
    p = torch.nn.Parameter(torch.ones(1, SMALLEST_NARROW // 2))
    ensure_state(p).shard = TensorShard(
        (ShardAxis(2, ((1, 1),), (object(),)), full_axis(SMALLEST_NARROW // 2))
    )
    assert is_large(p)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8", "nvfp4"])
def test_a_plain_weight_carries_nothing(name):
    """So that other programs read it when it is saved."""
    p = ng.convert(torch.nn.Linear(96, 128), name).weight
    assert vars(p) == {}
    assert torch.equal(through_a_file(p, weights_only=True), p)


def test_a_prescale_halves_on_overflow_and_doubles_over_a_thousand_steps():
    mu = torch.tensor(1.0)
    assert next_mu(mu, torch.tensor(1.1e-5)) == 0.5
    for _ in range(1000):
        mu = next_mu(mu, torch.tensor(0.9e-5))
    torch.testing.assert_close(mu, torch.tensor(2.0), rtol=1e-4, atol=0)
    mu = torch.tensor([0.3, 0.5, 0.99, 1.0, 1.9, 2.0])
    assert applied(mu).tolist() == [0.25, 0.5, 0.5, 1, 1, 2]
    unknown, known = PreScale(mu=0), PreScale(mu=1)
    for factor in (unknown, known):  # on the wire it begins with one over the root of the devices
        factor.begin(4)
        factor.begin(16)  # only the first counts
    assert (unknown.tensors["mu"], known.tensors["mu"]) == (0.5, 1)
