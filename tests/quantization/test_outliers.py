"""Remedies for FP4 and delayed scales, against published cases and the formulas by hand."""

import math

import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.formats import random_stream
from narrowgauge.quantization import (
    QuantContext,
    clamp_outliers,
    emulate,
    estimator_slope,
    make_cast,
    quantize_in_context,
)
from narrowgauge.quantization.stages.hadamard import hadamard

FP4_POW2 = make_cast({"cast": "fp4-row", "power_of_two": True})


def test_the_estimator_equals_ms_amps_published_case():
    """k = 5, cap 3, bf16, x from -6 to 6 in 20 points (MS-AMP, tests/operators/test_fp4_quantize.py)."""
    half = [0.2002, 0.4375, 0.6055, 0.2168, 1.8359, 0.2695, 0.3027, 0.2695, 0.2402, 0.5781]
    x = torch.linspace(-6, 6, 20).bfloat16()
    c = make_cast({"cast": "fp4-row", "estimator_k": 5, "estimator_cap": 3})
    slope = estimator_slope(x.unsqueeze(0), c, -1)[0].bfloat16()
    # Theirs computes in bf16 throughout; ours in float32, so the last bits may differ.
    torch.testing.assert_close(slope.float(), torch.tensor(half + half[::-1]), rtol=0.02, atol=2e-3)


def test_the_estimator_by_hand():
    """On the grid 1/k; the mean of the capped slope over a uniform x is 0.593 for k = 5."""
    c = make_cast({"cast": "fp4-row", "estimator_k": 5, "estimator_cap": 3})
    grid = torch.tensor([[0, 0.5, 1, 1.5, 2, 3, 4, 6.0]])
    torch.testing.assert_close(estimator_slope(grid, c, -1), torch.full_like(grid, 0.2))
    x = torch.linspace(0, 6, 200_001).unsqueeze(0)
    slope = estimator_slope(x, c, -1)
    assert slope.max() == 3
    widths = torch.where(x < 2, 0.5, torch.where(x < 4, 1.0, 2.0))
    weighted = (slope / widths).sum() / (1 / widths).sum()  # every interval counts alike
    assert weighted.item() == pytest.approx(0.593, abs=2e-3)
    u = 2 * 0.7 / 1 - 1  # x = 2.7 lies 0.7 above 2, in an interval of width 1
    at = estimator_slope(torch.tensor([[2.7, 6.0]]), c, -1)[0, 0].item()
    assert at == pytest.approx(abs(u) ** (1 / 5 - 1) / 5, rel=1e-5)


def test_ms_amps_fp4_cases_with_power_of_two_scales():
    """Its cases 'tensor-wise' and 'per channel' (MS-AMP, tests/operators/test_fp4_quantize.py)."""
    x = torch.tensor([[0.001, 0.048, 0.0997], [0.1503, 0.2002, 0.2497], [0.2974, 0.30699, 0.4001]]).bfloat16()
    whole = ng.quantize(x.flatten().unsqueeze(0), FP4_POW2).dequantize().view(3, 3)
    assert whole.tolist() == [[0, 0.0625, 0.125], [0.125, 0.1875, 0.25], [0.25, 0.25, 0.375]]
    rows = torch.tensor(
        [[-0.01, 0.48, -9.67], [1.623, -2.222, 24.67], [-2.874, 3.699, -34.57], [0.85, -1.343, 18.88]]
    ).bfloat16()
    expected = [[0, 0.5, -8], [1.5, -2, 24], [-3, 4, -32], [0.75, -1.5, 16]]
    # there a scale belongs to a column of the matrix
    assert (
        ng.quantize(rows, FP4_POW2, axis=0).dequantize().abs().tolist()
        == torch.tensor(expected).abs().tolist()
    )
    assert torch.equal(
        ng.quantize(rows.T, FP4_POW2).dequantize(), ng.quantize(rows, FP4_POW2, axis=0).dequantize().T
    )


@pytest.mark.parametrize(("amax", "encode"), [(10.0, 32.0), (10000.0, 1 / 32), (448.0, 1.0), (0.0, 1.0)])
def test_ms_amps_power_of_two_scale(amax, encode):
    q = ng.quantize(torch.tensor([amax, 0.0]), make_cast({"cast": "e4m3", "power_of_two": True}))
    assert q.scales.item() == 1 / encode


def test_outliers_are_the_largest_and_smallest_share():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    clamped = clamp_outliers(x, 0.99)
    changed = (clamped != x).double().mean().item()
    assert changed == pytest.approx(0.02, abs=1e-3)
    assert (clamped.min(), clamped.max()) == (x.flatten().sort().values[81], x.flatten().sort().values[8110])


def test_what_is_clamped_comes_back_in_high_precision():
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    x[3, 5] = 100.0
    plain, clamped, whole = (
        emulate(x, make_cast({"cast": "fp4-row"} | extra), -1, torch.bfloat16)[0]
        for extra in ({}, {"outliers": 0.99}, {"outliers": 0.99, "compensate": True})
    )
    error = [((y - x).norm() / x.norm()).item() for y in (clamped, whole)]
    assert clamped.max() < 4
    assert error[0] > 0.8
    assert error[1] < 0.09, "what is left is the rounding of the rest"
    assert (whole - x)[3].norm() < 0.3 * (plain - x)[3].norm(), "an outlier costs its row no resolution"
    torch.testing.assert_close(whole - clamped, x - clamp_outliers(x, 0.99), rtol=0, atol=1e-5)


@pytest.mark.parametrize("transform", [{}, {"hadamard": 16}], ids=["plain", "hadamard"])
@pytest.mark.parametrize("name", ["fp4-row", "mxfp4", "nvfp4", "e4m3"])
def test_what_comes_back_is_added_to_the_stored_numbers(name, transform):
    """Under a tensor scale and after a transform as well: the rest is of the tensor that was clamped."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    stored = make_cast({"cast": name, "outliers": 0.97} | transform)
    operand, scale = emulate(x, stored.having(compensate=True), -1, torch.bfloat16)
    before = hadamard(x, 16, -1) if transform else x
    expected = ng.quantize(x, stored).dequantize() + (before - clamp_outliers(before, 0.97))
    assert scale is None
    assert torch.equal(operand, expected)


def test_the_bits_of_hardware_round_as_its_definition_says():
    """floor(t + r / 256): the expectation lies low by less than 1/256 of a step; with 24 bits it does not."""
    x = torch.full((1, 2**16), 0.25 + 0.5 / 256)
    bits = random_stream(1, 2, 3)
    r = (bits.uniform((1, 2**16)) * 256).floor()
    by_hand = ((x / 0.5 + r / 256).floor() * 0.5).double()
    c = make_cast({"cast": "mxfp4", "rounding": "stochastic", "random_bits": 8})
    block = torch.cat([torch.full((2**11, 1), 6.0), x.view(2**11, 32)[:, 1:]], 1)  # a scale of 1
    got = ng.quantize(block, c, generator=random_stream(1, 2, 3)).dequantize().double()
    assert torch.equal(got[:, 1:], by_hand.view(2**11, 32)[:, 1:])
    unbiased = ng.quantize(block, make_cast({"cast": "mxfp4", "rounding": "stochastic"}), generator=bits)
    deviation = 0.5 * 0.5 / math.sqrt(2**16)
    assert got[:, 1:].mean().item() == pytest.approx(0.25, abs=4 * deviation)
    assert unbiased.dequantize()[:, 1:].double().mean().item() == pytest.approx(
        x[0, 0].item(), abs=4 * deviation
    )


def test_signs_of_the_transform():
    x = torch.randn(8, 32)
    plus = ng.quantize(x, make_cast({"cast": "nvfp4", "hadamard": 16, "signs": [1] * 16}))
    own = ng.quantize(x, make_cast({"cast": "nvfp4", "hadamard": 16}))
    te = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    given = ng.quantize(x, make_cast({"cast": "nvfp4", "hadamard": 16, "signs": te}))
    random = make_cast({"cast": "nvfp4", "hadamard": 16, "signs": "random"})
    assert torch.equal(own.codes, given.codes)
    assert not torch.equal(own.codes, plus.codes)
    assert torch.equal(
        quantize_in_context(x, random, -1, QuantContext(signs=torch.tensor(te))).codes, own.codes
    )
    with pytest.raises(UserError, match="takes random signs"):
        ng.quantize(x, random)


@pytest.mark.parametrize("kind", ["normal", "zeros", "ties", "infinite", "nan", "negative nan", "one"])
@pytest.mark.parametrize("quantile", [0.51, 0.9, 0.999])
def test_quantiles_counted_from_bits_are_elements_of_the_sorted_tensor(kind, quantile):
    x = torch.randn(50, 77, generator=torch.Generator().manual_seed(1)).bfloat16()
    if kind == "zeros":
        x[:40] = 0
        x[:20] *= -1
    elif kind == "ties":
        x = (x * 2).round() / 2
    elif kind == "infinite":
        x[3], x[4] = math.inf, -math.inf
    elif kind == "nan":
        x[3, 5] = math.nan
    elif kind == "negative nan":
        x.view(torch.int16)[3, 5] = -1
    elif kind == "one":
        x = x[:1, :1]
    n, ordered = x.numel(), x.float().flatten().sort().values
    low, high = ordered[int((1 - quantile) * n)], ordered[min(int(quantile * n), n - 1)]
    expected = x.float().clamp(low, high)
    got = clamp_outliers(x, quantile)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.float().nan_to_num(), expected.nan_to_num())
    assert torch.equal(clamp_outliers(x.float(), quantile).bfloat16().nan_to_num(), got.nan_to_num())
