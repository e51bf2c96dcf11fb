"""The promises of quantized tensors that a user relies on, and of casts; the estimator, clamps and means."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.formats import random_stream, unpack
from narrowgauge.quantization import (
    QuantContext,
    blocks,
    cast,
    clamp_outliers,
    emulate,
    estimator_slope,
    make_cast,
)
from narrowgauge.recipes import parse_recipe
from quantization.casts import BY_ROW, E5M3, FOUR_OVER_SIX, SCALED
from support.fault_table import case


@pytest.mark.parametrize("name", SCALED)
def test_codes_scales_and_bytes_are_what_they_are_said_to_be(name):
    for axis in (-1, 0):
        q = ng.quantize(torch.randn(64, 96) * 100, name, axis=axis)
        packed = q.packed()
        assert packed.numel() == 64 * 96 * q.cast.element.bits // 8
        assert torch.equal(unpack(packed, q.cast.element, 96), q.codes)
        if q.scale_codes is None:
            assert q.cast.scale == "fp32"
            continue
        dtype = {"e8m0": ml_dtypes.float8_e8m0fnu, "e4m3": ml_dtypes.float8_e4m3fn}[q.cast.scale]
        found = q.scale_codes.numpy().view(dtype).astype(np.float32)
        np.testing.assert_array_equal(found, q.scales.numpy())


@case("E2", tier="quick")
@pytest.mark.parametrize("name", [*SCALED, E5M3, BY_ROW, {"cast": "nvfp4", "center": "tokens"}], ids=str)
def test_non_finite_input_never_comes_out_finite(name):
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.randn(32, 64)
        x[5, 40] = bad
        q = ng.quantize(x, name)
        rows, columns = q.cast.block or (32, 64)
        columns = columns or 64
        expected = torch.zeros(32, 64, dtype=torch.bool)
        r, c = 5 // rows * rows, 40 // columns * columns
        expected[r : r + rows, c : c + columns] = True
        assert torch.equal(q.dequantize().isnan(), expected)
        if q.scale_codes is not None:
            nan = {"e8m0": 0xFF, "e5m3": 0xFC}.get(q.cast.scale, 0x7F)
            assert set(q.scale_codes[q.scales.isnan()].tolist()) == {nan}


def test_of_equal_errors_the_first_candidate_is_kept():
    x = torch.zeros(1, 32)
    x[0, 0] = 6 * 256  # the tensor scale is 1, and so is that of a block of whole numbers
    x[0, 16:20] = torch.tensor([4.0, 2.0, 1.0, 0.5])
    q = ng.quantize(x, FOUR_OVER_SIX)
    assert q.scales.tolist() == [[256, 1]]  # 4 is nowhere better in the first, but exact in the second
    assert ng.quantize(x, FOUR_OVER_SIX | {"candidates": [4, 6]}).scales.tolist() == [[384, 1]]


#: Shapes of several chunks of 700 elements, of blocks that fit none, of one row, of one column.
SHAPES = [(150, 77), (1, 3000), (3000, 1), (4, 60, 33)]
WALKS = list(itertools.product(SHAPES, (-1, 0), ("nearest-even", "stochastic")))


@pytest.mark.parametrize("name", SCALED)
def test_chunks_give_the_numbers_of_the_full_tensor(name, monkeypatch):
    """Each cast in four of the walks, which together are all; the passes in C have no chunks."""
    monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")
    large = blocks.CHUNK
    for shape, axis, rounding in WALKS[SCALED.index(name) % 4 :: 4]:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
        x[0].view(-1)[:1] = float("inf")
        c, found = make_cast({"cast": name, "rounding": rounding}), []
        stream, none = random_stream(1, 2, 3), x[:0]
        assert emulate(none, c, axis, torch.bfloat16, QuantContext(stream))[0].shape == none.shape
        for size in (large, 700):
            monkeypatch.setattr(blocks, "CHUNK", size)
            q = ng.quantize(x, c, axis, generator=stream)
            operand, _ = emulate(x, c, axis, torch.bfloat16, QuantContext(stream))
            found.append([q.codes, q.scales, q.tensor_scale, operand.float()])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_a_table_without_a_name_has_one_of_its_parts_or_is_the_named_cast():
    per_tensor = {"element": "int4", "block": [16, 16], "scale": "e4m3", "tensor_scale": "tensor"}
    assert make_cast(E5M3).name == "e2m1-1x16-e5m3"
    assert make_cast(per_tensor).name == "int4-16x16-e4m3-per-tensor"
    assert make_cast({"element": "e4m3", "scale": "e5m3"}).name == "e4m3-tensor-e5m3"
    assert make_cast({"cast": "mxfp8", "scale": "fp32", "block": 128}) == cast("fp8-1x128")
    assert make_cast({"cast": "nvfp4", "rounding": "stochastic"}).name == "nvfp4"
    mine = parse_recipe('fprop = {element = "e2m1", block = 16, scale = "e5m3"}', "mine")
    assert mine.casts["fprop.x"] == mine.casts["fprop.w"] == make_cast(E5M3)


def test_a_quantized_tensor_shows_its_cast_and_no_codes():
    for device in ("cpu", "meta"):
        shown = repr(ng.quantize(torch.ones(64, 32, device=device), BY_ROW))
        assert shown.startswith("QTensor(shape=(64, 32)")
        assert "tensor_scale=a tensor of shape (64, 1), cast=Cast(" in shown


def test_the_estimator_equals_ms_amps_published_case():
    """k = 5, cap 3, bf16, x from -6 to 6 in 20 points (MS-AMP, tests/operators/test_fp4_quantize.py)."""
    half = [0.2002, 0.4375, 0.6055, 0.2168, 1.8359, 0.2695, 0.3027, 0.2695, 0.2402, 0.5781]
    estimated = make_cast({"cast": "fp4-row", "estimator_k": 5, "estimator_cap": 3})
    x = torch.linspace(-6, 6, 20).bfloat16()
    slope = estimator_slope(x.unsqueeze(0), estimated, -1)[0].bfloat16()
    # Theirs computes in bf16 throughout; ours in float32, so the last bits may differ.
    torch.testing.assert_close(slope.float(), torch.tensor(half + half[::-1]), rtol=0.02, atol=2e-3)


def test_power_of_two_scales_give_ms_amps_published_cases():
    """Its 'tensor-wise' and 'per channel' (tests/operators/test_fp4_quantize.py)."""
    c = make_cast({"cast": "fp4-row", "power_of_two": True})
    x = torch.tensor([[0.001, 0.048, 0.0997, 0.1503, 0.2002, 0.2497, 0.2974, 0.30699, 0.4001]]).bfloat16()
    expected = [[0, 0.0625, 0.125, 0.125, 0.1875, 0.25, 0.25, 0.25, 0.375]]
    assert ng.quantize(x, c).dequantize().tolist() == expected
    rows = [[-0.01, 0.48, -9.67], [1.623, -2.222, 24.67], [-2.874, 3.699, -34.57], [0.85, -1.343, 18.88]]
    by_column = ng.quantize(torch.tensor(rows).bfloat16(), c, axis=0).dequantize()
    assert by_column.abs().tolist() == [[0, 0.5, 8], [1.5, 2, 24], [3, 4, 32], [0.75, 1.5, 16]]


def normal(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


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
