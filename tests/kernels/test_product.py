"""Around a product: scales, rounding, operands in tiles as the hardware reads them, and FP4's rows.

These rows: quantiles of any numbers, rows in parts, slopes of rounding. All bit for bit, but for slopes.
"""

from dataclasses import replace

import pytest
import torch

from gpu.joined_operations import bytes_of
from kernels.common import INF, NAN, assert_same, normal
from narrowgauge.kernels.cast import emulate_rows
from narrowgauge.kernels.gradient_sum import through_rounding
from narrowgauge.kernels.product import scaled_and_rounded
from narrowgauge.kernels.triton.fp4_rows import launch_ranked
from narrowgauge.nn import Linear, set_step
from narrowgauge.quantization import QuantContext, estimator_slope, make_cast
from narrowgauge.quantization import emulate as emulate_in_torch
from narrowgauge.quantization.transforms import quantile_ranks, ranked
from narrowgauge.recipes import recipe
from support.interpreted import plain_operations

BF16 = torch.bfloat16


@pytest.mark.parametrize("has_rest", [True, False])
def test_scales_of_rows_and_columns_are_applied_as_by_torch(device, has_rest):
    product, rest, rows, columns = (normal(5, 1100, seed=i).to(device) for i in range(4))
    options = {"rest": rest if has_rest else None}
    for r, c in ((rows[:, 0], columns[0]), (rows[:, 0], columns[0, 0]), (rows[0, 0], columns[0])):
        options["columns"] = c
        ours = scaled_and_rounded(product, r, BF16, **options)
        with plain_operations():
            assert torch.equal(ours, scaled_and_rounded(product, r, BF16, **options))


def special(n):
    words = torch.tensor([0x0000, 0x8000, 0x7F80, 0xFF80, 0x0001, 0x8001, 0x7F7F, 0xFF7F], dtype=torch.int32)
    return words.repeat(n)[:n].to(torch.int16).view(BF16)


@pytest.mark.tier("thorough")
def test_ranks_are_those_of_a_selection_and_nan_is_the_largest(device):
    for numbers in (normal(37, 301, dtype=BF16), special(1001), torch.full((5, 3), -2.0).bfloat16()):
        n = numbers.numel()
        for low, high in ((0, n - 1), (n // 100, n - 1 - n // 100), (n // 2, n // 2)):
            found = launch_ranked(numbers.to(device), low, high)
            expected = ranked(numbers.float().to(device), low, high)
            assert [f.item() for f in found] == [e.item() for e in expected]
            assert not any(torch.signbit(f) and f == 0 for f in found)
    numbers = normal(500, dtype=BF16)
    numbers[7], numbers[9] = NAN, -NAN
    low, high = launch_ranked(numbers.to(device), 497, 498)
    assert low.item() == numbers.nan_to_num(-9).max().item()
    assert high.isnan()


APART = {"cast": "fp4-row", "outliers": 0.99, "compensate": True}
CLAMPS = APART | {"compensate": False}


def outlying(rows, columns):
    """Normal numbers, of which some in each row are up to thirty times as large."""
    x = normal(rows, columns, dtype=BF16)
    x[:, ::40] *= torch.linspace(1, 30, rows).bfloat16()[:, None]
    return x


@pytest.mark.tier("thorough")  # it clamps and compensates; the others do one of both
@pytest.mark.parametrize("cast", [APART, CLAMPS, {"cast": "fp4-row"}, {"cast": "fp8-row"}])
def test_rows_in_parts_are_the_numbers_of_the_reference(device, cast):
    """The rest of an element beyond twice the limit is rounded to bf16; all else is equal, bit for bit."""
    cast = make_cast(cast)
    wide = outlying(37, 1301)
    for x in (wide, wide[:, 8:200], special(24 * 96).view(24, 96), normal(3, 1, dtype=BF16)):
        x = x.to(device)
        values, scale, rest = emulate_rows(x, cast)
        numbers = values.float() * scale[:, None]
        whole = cast if rest is None else make_cast(CLAMPS)
        expected, none = emulate_in_torch(x, whole, -1, BF16)
        assert none is None
        torch.testing.assert_close(numbers, expected.float(), rtol=0, atol=0, equal_nan=True)
        if rest is None:
            continue
        low, high = ranked(x.float(), *quantile_ranks(x.numel(), 0.99))
        cut = x.float() - x.float().clamp(low, high)
        assert (rest.float() == cut.bfloat16().float())[~cut.isnan()].all()
        near = x.float().abs() <= 2 * torch.where(x < 0, -low, high)
        assert (rest.float() == cut)[near & ~cut.isnan()].all()


def test_rows_that_have_no_kernel_are_left_to_the_reference(device):
    x = normal(32, 64, dtype=BF16).to(device)
    for cast in ({"cast": "mxfp4"}, {"cast": "fp4-row", "rounding": "stochastic"}, {"cast": "e4m3"}):
        assert emulate_rows(x, make_cast(cast)) is None
    assert emulate_rows(x.T, make_cast({"cast": "fp4-row"})) is None
    assert emulate_rows(x.float(), make_cast(APART)) is None


def test_the_slope_of_rounding_is_that_of_the_reference(device):
    cast = make_cast({"cast": "fp4-row", "estimator_k": 5, "estimator_cap": 3})
    w, dw = normal(19, 1100, seed=1).to(device), normal(19, 1100, dtype=BF16).to(device)
    w[3, 5], w[4] = INF, 0.0
    ours = through_rounding(dw, w, cast, QuantContext())
    expected = dw * estimator_slope(w, cast, -1)
    finite = torch.arange(19) != 3
    torch.testing.assert_close(ours[finite], expected[finite], rtol=3e-6, atol=0)
    assert not ours[3].isfinite().any()


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_layer_asks_for_the_same_products(name, device, monkeypatch):
    """Forward and backward, with tiles and without; only the matmuls are left out, which no CPU has."""
    asked = []

    def taken(mat_a, mat_b, **given):
        asked.append(bytes_of({"mat_a": mat_a, "mat_b": mat_b} | given))
        return torch.ones(mat_a.shape[0], mat_b.shape[1], device=device).bfloat16()

    monkeypatch.setattr("narrowgauge.nn.gemm.torch_scaled_mm", taken)
    x = normal(48, 64, seed=1, dtype=torch.bfloat16).to(device)
    for in_tiles in (True, False):
        if not in_tiles:
            monkeypatch.setattr("narrowgauge.nn.operands.tiled_operand", lambda *_: None)
        torch.manual_seed(0)
        layer = Linear(torch.nn.Linear(64, 96, bias=False), recipe(name), 0).to(device)
        layer.spec = replace(layer.spec, native=True)  # what a GPU of the right generation decides
        set_step(layer, 1, 1, 0)
        y = layer(x.clone().requires_grad_())
        y.backward(torch.full_like(y, 0.25))
    assert len(asked) == 6
    for one, other in zip(asked[:3], asked[3:], strict=True):
        assert_same(one, other)
