"""State in low precision: what is read is what was written, rounded once; bytes; memory allocated once."""

import math

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.formats import random_stream
from narrowgauge.quantization import GradientState, QuantizedState, cast_names, make_cast, state_cast_names
from narrowgauge.quantization.stages.state import code_values, to_codes
from narrowgauge.quantization.state import quantized_state

ROWS, COLUMNS = 48, 384
POW2 = {"cast": "e4m3", "power_of_two": True}
BYTES = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp16-scaled": 2,
    "e4m3": 1,
    "fp8-row": 1 + 4 / COLUMNS,
    "fp8-1x128": 1 + 4 / 128,
    "coat": 1 + 12 / 128,
    "mxfp8": 1 + 1 / 32,
    "mxfp6-e2m3": 6 / 8 + 1 / 32,
    "dynamic8": 1 + 8 / COLUMNS,  # two blocks of 256 in a row of 384
    "mxfp4": 4 / 8 + 1 / 32,
    "nvfp4": 4 / 8 + 1 / 16,
}


def at_rest(cast, x):
    state = QuantizedState(x.shape, make_cast(cast))
    state.write(x)
    return state


def numbers(seed=0):
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) * 1e-3


@pytest.mark.parametrize("name", [n for n in cast_names() if make_cast(n).is_scaled])
def test_codes_are_those_of_quantize(name):
    x = numbers()
    assert torch.equal(at_rest(name, x).read(), ng.quantize(x, name).dequantize())


@pytest.mark.parametrize("name", [*cast_names(), *state_cast_names()])
def test_what_is_read_is_contiguous(name):
    """Also where blocks are ragged: torch's fused optimizers walk through memory, not through strides."""
    x = numbers()[:, :80].contiguous()
    x = x.abs() if "unsigned" in name else x
    state = at_rest(name, x)
    assert state.read().is_contiguous()
    assert state.read().shape == x.shape
    assert (state.read() - x).norm() < 0.2 * x.norm()


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_plain_cast_converts(name):
    x = numbers()
    assert torch.equal(at_rest(name, x).read(), ng.round_to(x, name))


@pytest.mark.parametrize("name", BYTES)
def test_bytes_an_element(name):
    assert at_rest(name, numbers()).nbytes / (ROWS * COLUMNS) == pytest.approx(BYTES[name], abs=1e-3)


@pytest.mark.parametrize("name", [*cast_names(), *state_cast_names()])
def test_it_begins_with_zeros_and_is_allocated_once(name):
    state = QuantizedState(torch.Size((ROWS, COLUMNS)), make_cast(name))
    assert not state.read().any()
    before = {k: t.data_ptr() for k, t in state.tensors.items()}
    state.write(numbers())
    assert state.read().any()
    assert {k: t.data_ptr() for k, t in state.tensors.items()} == before


@pytest.mark.parametrize("cast", ["fp16-scaled", POW2, "mxfp8", "mxfp4", "bf16"])
def test_what_was_read_is_written_back_unchanged(cast):
    state = at_rest(cast, numbers())
    once = state.read().clone()
    state.write(once)
    assert torch.equal(state.read(), once)


class TestScaledFp16:
    def test_it_keeps_what_plain_fp16_loses(self):
        x = torch.full((8, 8), 2.0**-30)
        assert torch.equal(at_rest("fp16-scaled", x).read(), x)
        assert not x.half().any()

    def test_rounding_is_that_of_eleven_bits(self):
        x = numbers()
        largest = x.abs().max()
        error = (at_rest("fp16-scaled", x).read() - x).abs()
        assert (error <= x.abs() * 2.0**-11 + largest * 2.0**-39).all()
        assert error.max() > 0

    def test_a_small_number_survives_the_way_to_fp8(self):
        """MS-AMP's case: 2^-17 in scaled FP16, then E4M3."""
        x = torch.full((4, 4), 2.0**-17)
        assert torch.equal(at_rest(POW2, at_rest("fp16-scaled", x).read()).read(), x)

    def test_it_has_no_codes_of_a_byte(self):
        with pytest.raises(UserError, match="'fp16-scaled' has no codes of a byte: it is for state"):
            ng.quantize(numbers(), "fp16-scaled")


class TestRangeExpansion:
    def by_hand(self, block):
        """COAT's formulas on one block, in float64, but for the rounding to E4M3."""
        magnitudes = np.abs(block[block != 0])
        largest, smallest = magnitudes.max(), magnitudes.min()
        k = math.floor(math.log2(448**2 / 2) / math.log2(largest / smallest) * 16) / 16
        c = math.sqrt(largest * smallest)
        stretched = np.sign(block) * (np.abs(block) / c) ** k
        scaled = torch.from_numpy(stretched * (448 / np.abs(stretched).max())).float()
        rounded = ng.round_to(scaled, "e4m3").double().numpy() * np.abs(stretched).max() / 448
        return np.sign(rounded) * np.abs(rounded) ** (1 / k) * c

    def test_it_is_the_papers(self):
        x = numbers().square() * 1e-3
        x[3, :50] = 0
        got = at_rest("coat", x).read()
        for row in range(0, ROWS, 7):
            for start in range(0, COLUMNS, 128):
                block = slice(start, start + 128)
                hand = self.by_hand(x[row, block].double().numpy())
                # a code may differ where float32 and float64 fall on different sides of a tie
                close = np.isclose(got[row, block], hand, rtol=1e-4, atol=0)
                assert close.mean() > 0.97
                np.testing.assert_allclose(got[row, block], hand, rtol=0.13, atol=1e-12)

    def test_it_halves_the_error_of_a_first_moment(self):
        x = numbers()
        plain, stretched = (at_rest(c, x).read() for c in ("fp8-1x128", "coat"))
        assert (stretched - x).norm() < 0.6 * (plain - x).norm()

    def test_nothing_of_a_second_moment_becomes_zero(self):
        v = numbers().square()
        assert (at_rest("fp8-1x128", v).read() == 0).any()
        assert (at_rest("coat", v).read() > 0).all()

    @pytest.mark.parametrize("value", [0.0, -3.0, 2.0**-126])
    def test_a_block_of_one_magnitude(self, value):
        x = torch.full((2, 128), value)
        torch.testing.assert_close(at_rest("coat", x).read(), x, rtol=1e-5, atol=0)

    def test_it_needs_blocks(self):
        with pytest.raises(UserError, match="expand = True, but it needs fp32 scales of blocks"):
            make_cast({"cast": "e4m3", "expand": True})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*cast_names(), *state_cast_names()])
def test_non_finite_input_never_comes_out_finite(name, bad):
    x = numbers()
    x[5, 40] = bad
    assert not at_rest(name, x).read()[5, 40].isfinite()


@pytest.mark.parametrize(
    "cast", ["bf16", "fp16-scaled", "e4m3", "fp8-1x128", "mxfp8", "nvfp4", "coat", "dynamic8"]
)
def test_a_factor(cast):
    state = at_rest(cast, numbers())
    before = state.read().clone()
    codes = state.tensors.get("codes", torch.zeros(1)).clone()
    state.scale_by(torch.tensor(0.25))
    torch.testing.assert_close(state.read(), before * 0.25, rtol=1e-6, atol=0)
    if cast != "mxfp8":  # whose scales are powers of two, and may be another one afterwards
        assert torch.equal(state.tensors.get("codes", torch.zeros(1)), codes)


@pytest.mark.parametrize("name", ["bf16", "e4m3", "fp16-scaled"])
def test_stochastic_rounding_is_right_on_average_and_repeats(name):
    cast = make_cast({"cast": name, "rounding": "stochastic"})
    x = numbers()[:8, :64]
    state = QuantizedState(x.shape, cast)
    sums, count = torch.zeros(x.shape, dtype=torch.float64), 400
    for step in range(count):
        state.write(x, random_stream(7, step, 3))
        sums += state.read()
    gap = (at_rest(name, x).read() - x).abs().max()
    assert ((sums / count - x).abs() <= 6 * 2 * gap / math.sqrt(count)).all()
    assert (sums / count - x).norm() < 0.2 * (at_rest(name, x).read() - x).norm()
    state.write(x, random_stream(7, 5, 3))
    once = state.read().clone()
    state.write(x, random_stream(7, 5, 3))
    assert torch.equal(state.read(), once)


@pytest.mark.parametrize("key", [{"hadamard": 16}, {"outliers": 0.99}, {"history": 4}])
def test_what_belongs_to_operands_is_refused(key):
    with pytest.raises(UserError, match="is for operands of a matmul; remove the key"):
        QuantizedState(torch.Size((8, 8)), make_cast({"cast": "e4m3"} | key))


class TestCodebook:
    @pytest.mark.parametrize("name", ["dynamic", "dynamic-unsigned"])
    def test_the_map(self, name):
        values = code_values(name)
        assert len(set(values)) == 256
        assert values[-1] == 1
        assert values.index(0) == (0 if "unsigned" in name else 127)
        smallest = min(v for v in values if v > 0)
        assert smallest == pytest.approx(0.55e-6 if name == "dynamic" else 0.325e-6)

    @pytest.mark.parametrize("name", ["dynamic", "dynamic-unsigned"])
    def test_every_number_takes_the_nearest_code(self, name):
        values = np.array(code_values(name))
        middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
        x = np.concatenate([middles, np.nextafter(middles, 2), np.nextafter(middles, -2), values])
        x = np.concatenate([x, np.random.default_rng(0).uniform(-1, 1, 5000)]).astype(np.float32)
        distances = np.abs(x.astype(np.float64)[:, None] - values)
        lower = np.argmin(distances, axis=1)  # the first of two
        assert (to_codes(torch.from_numpy(x), name).numpy() == lower).all()

    def test_torchao_has_the_same_map(self):
        quant_utils = pytest.importorskip("torchao.optim.quant_utils", reason="torchao is not installed")
        for name in ("dynamic", "dynamic-unsigned"):
            theirs = torch.tensor(quant_utils.create_dynamic_map(signed=name == "dynamic"))
            torch.testing.assert_close(torch.tensor(code_values(name)), theirs, rtol=1e-6, atol=0)

    def test_a_second_moment_keeps_its_small_numbers(self):
        """Where one scale for the tensor loses whole rows."""
        v = numbers().square() * torch.logspace(-6, 0, ROWS).unsqueeze(1)
        assert (at_rest("dynamic8-unsigned", v).read() > 0).float().mean() > 0.999
        assert (at_rest("e4m3", v).read() > 0).float().mean() < 0.7

    def test_operands_cannot_have_it(self):
        with pytest.raises(UserError, match="cast 'dynamic8' is for state"):
            ng.recipe("fp8").with_places({"fprop.x": "dynamic8"})
        with pytest.raises(UserError, match="'dynamic8' has no codes of a byte: it is for state"):
            ng.quantize(numbers(), "dynamic8")


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


def test_a_wide_gradient_is_not_fetched_from_the_host(monkeypatch):
    """Its copies would be found by the next step, which sums other gradients."""
    monkeypatch.setattr(quantized_state, "is_gpu", lambda _: True)
    gradient = GradientState(torch.Size((4,)), make_cast("fp16"), on_host=True)
    gradient.add(torch.ones(4), None)
    assert gradient.widen().tolist() == [1] * 4
    gradient.fetch()
    assert gradient.prefetched is None
    gradient.replace(None)
    for number in (2.0, 4.0):
        gradient.add(torch.full((4,), number), None)
    assert gradient.read().tolist() == [6] * 4
