"""Remedies for FP4 and delayed scales, against published cases and the formulas by hand."""

import math

import pytest
import torch

import narrowgauge as ng
from narrowgauge.quantization import clamp_outliers, emulate, estimator_slope, make_cast

FP4_POW2 = make_cast({"cast": "fp4-row", "power_of_two": True})
ESTIMATED = make_cast({"cast": "fp4-row", "estimator_k": 5, "estimator_cap": 3})


def normal(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_the_estimator_equals_ms_amps_published_case():
    """k = 5, cap 3, bf16, x from -6 to 6 in 20 points (MS-AMP, tests/operators/test_fp4_quantize.py)."""
    half = [0.2002, 0.4375, 0.6055, 0.2168, 1.8359, 0.2695, 0.3027, 0.2695, 0.2402, 0.5781]
    x = torch.linspace(-6, 6, 20).bfloat16()
    slope = estimator_slope(x.unsqueeze(0), ESTIMATED, -1)[0].bfloat16()
    # Theirs computes in bf16 throughout; ours in float32, so the last bits may differ.
    torch.testing.assert_close(slope.float(), torch.tensor(half + half[::-1]), rtol=0.02, atol=2e-3)


def test_ms_amps_fp4_cases_with_power_of_two_scales():
    """Its cases 'tensor-wise' and 'per channel' (MS-AMP, tests/operators/test_fp4_quantize.py)."""
    x = torch.tensor([[0.001, 0.048, 0.0997], [0.1503, 0.2002, 0.2497], [0.2974, 0.30699, 0.4001]]).bfloat16()
    whole = ng.quantize(x.flatten().unsqueeze(0), FP4_POW2).dequantize().view(3, 3)
    assert whole.tolist() == [[0, 0.0625, 0.125], [0.125, 0.1875, 0.25], [0.25, 0.25, 0.375]]
    rows = torch.tensor(
        [[-0.01, 0.48, -9.67], [1.623, -2.222, 24.67], [-2.874, 3.699, -34.57], [0.85, -1.343, 18.88]]
    ).bfloat16()
    expected = torch.tensor([[0, 0.5, -8], [1.5, -2, 24], [-3, 4, -32], [0.75, -1.5, 16]])
    by_column = ng.quantize(rows, FP4_POW2, axis=0).dequantize()  # there, too, each column has a scale
    assert torch.equal(by_column.abs(), expected.abs())


@pytest.mark.parametrize("kind", ["normal", "zeros", "ties", "infinite", "nan", "negative nan", "one"])
def test_quantiles_counted_from_bits_are_elements_of_the_sorted_tensor(kind):
    x = normal(50, 77, seed=1).bfloat16()
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
    for quantile in (0.51, 0.9, 0.999):
        low, high = ordered[int((1 - quantile) * n)], ordered[min(int(quantile * n), n - 1)]
        expected, got = x.float().clamp(low, high), clamp_outliers(x, quantile)
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.float().nan_to_num(), expected.nan_to_num())
        assert torch.equal(clamp_outliers(x.float(), quantile).bfloat16().nan_to_num(), got.nan_to_num())


@pytest.mark.parametrize("axis", [-1, 0])
def test_a_transform_sees_the_rest_and_the_mean_alike(axis):
    """Without rounding to speak of, the operand is the transformed tensor."""
    x, plain = normal(64, 64) + 4 * normal(1, 64, seed=1), {"cast": "mxfp8", "hadamard": 32}
    operands = [
        emulate(x, make_cast(table), axis, torch.float32)[0]
        for table in (plain | {"center": "tokens"}, plain)
    ]
    assert (operands[0] - operands[1]).norm() < 0.05 * operands[1].norm()
