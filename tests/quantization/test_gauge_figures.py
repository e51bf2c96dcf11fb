"""Gauges against the same statistics, worked out in numpy from dumped tensors, block by block."""

import math

import numpy as np
import pytest
import torch

from narrowgauge.quantization import (
    QuantContext,
    QuantizedState,
    cast,
    emulate,
    make_cast,
    quantize,
    quantize_in_context,
)
from narrowgauge.quantization.blocks import Blocks, blocks_of
from narrowgauge.quantization.gauges.figures import (
    cosine_similarity,
    figures,
    gauge,
    gauge_operand,
    gauge_product,
    gauge_state,
)
from narrowgauge.quantization.stages.hadamard import hadamard

CASTS = [
    "e4m3",
    "e5m2",
    "fp8-row",
    "fp8-128x128",
    "mxfp8",
    "mxfp6-e2m3",
    "mxint8",
    "mxfp4",
    "nvfp4",
    "nvfp4-2d",
]
SHAPES = [(33, 70), (5, 260)]  # no multiple of any block


def numbers(shape, seed=0, spread=6.0):
    """Numbers over many binades, with zeros among them, float32."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.normal(0, spread, shape))
    x[rng.random(shape) < 0.05] = 0
    return torch.tensor(x, dtype=torch.float32)


def blocks_in(blocks: Blocks):
    """Slices of each block."""
    for place in np.ndindex(*blocks.grid):
        yield place, tuple(slice(i * b, (i + 1) * b) for i, b in zip(place, blocks.size, strict=True))


def slow(x, y, blocks, scale_of, largest):
    """The definitions of the module's docstring, one block after the other, in float64."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    n, binades, amaxes, at_largest, clipped, nonfinite = x.size, [0] * 16, [], 0, 0, 0
    for place, block in blocks_in(blocks):
        good = np.isfinite(x[block]) & np.isfinite(y[block])
        nonfinite += (~good).sum()
        xs, ys, m = x[block][good], y[block][good], scale_of(place) * largest
        amaxes.append(np.abs(x[block]).max() if np.isfinite(x[block]).all() else 0.0)
        at_largest += (np.abs(ys) >= m * (1 - 2**-20)).sum() if m > 0 else 0
        clipped += (np.abs(xs) > m * (1 + 2**-20)).sum() if m > 0 else 0
    top = math.frexp(max(amaxes))[1]
    for a in amaxes:
        binades[min(top - math.frexp(a)[1], 15) if a else 15] += 1
    good = np.isfinite(x) & np.isfinite(y)
    x, y = x[good], y[good]
    noise = ((y - x) ** 2).sum()
    return {
        "nonfinite": nonfinite / n,
        "zeros": (nonfinite + (y == 0).sum()) / n,
        "underflow": ((x != 0) & (y == 0)).sum() / n,
        "largest": at_largest / n,
        "clipped": clipped / n,
        "sqnr_db": 10 * math.log10((x**2).sum() / noise) if noise else None,
        "mean_error": (y - x).sum() / n,
        "rms": math.sqrt((x**2).sum() / n),
        "amax": [min(amaxes), sorted(amaxes)[(len(amaxes) - 1) // 2], max(amaxes)],
        "binades": binades,
    }


def assert_same(found, expected):
    for key in ("nonfinite", "zeros", "underflow", "largest", "clipped"):
        assert found[key] == expected[key], key
    assert found["rms"] == pytest.approx(expected["rms"], rel=1e-5)
    assert (found["sqnr_db"] is None) == (expected["sqnr_db"] is None)
    assert found["sqnr_db"] is None or found["sqnr_db"] == pytest.approx(expected["sqnr_db"], rel=1e-5)
    tiny = 1e-6 * expected["rms"]
    assert found["mean_error"] == pytest.approx(expected["mean_error"], rel=1e-4, abs=tiny)
    assert found["amax"] == pytest.approx(expected["amax"])
    padded = found["binades"] + [0] * (16 - len(found["binades"]))
    assert padded == expected["binades"]


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_operand_is_gauged_as_numpy_does(name, shape, axis):
    c, x = cast(name), numbers(shape)
    q = quantize(x, c, axis)
    seen = q.dequantize()
    found = figures(gauge_operand(x, seen, c, axis).tolist())
    scales = (q.scales * q.tensor_scale).numpy()
    expected = slow(
        x, seen, blocks_of(x.shape, c, axis), lambda p: scales[p] if scales.ndim else scales, c.element.max
    )
    assert_same(found, expected)
    assert found["scales"] == pytest.approx([scales.min(), scales.max()])
    assert found["elements"] == x.numel()
    values, scale = emulate(x, c, axis, torch.bfloat16)
    values = values.float() * (1 if scale is None else scale)
    assert figures(gauge_operand(x, values, c, axis).tolist()) == found, "emulated and stored are alike"


@pytest.mark.parametrize("name", ["mxfp4", "e4m3"])
def test_underflow_and_zeros_are_told_apart(name):
    found = figures(
        gauge_operand(x := numbers((64, 96)), quantize(x, name).dequantize(), cast(name), -1).tolist()
    )
    assert 0.03 < found["zeros"] - found["underflow"] < 0.07, "those that were there before"
    assert found["underflow"] > 0.05


@pytest.mark.parametrize("axis", [-1, 0])
def test_a_transform_pads_the_axis(axis):
    """63 tokens or 40 inputs do not divide by the group: the gauges cover the values with their padding."""
    c, x = make_cast({"cast": "nvfp4", "hadamard": 32}), numbers((63, 40))
    padded = torch.nn.functional.pad(x, (0, 24) if axis == -1 else (0, 0, 0, 1))
    q = quantize(x, c, axis)
    assert figures(gauge_operand(x, q.dequantize(), c, axis).tolist()) == figures(
        gauge_operand(padded, q.dequantize(), c, axis).tolist()
    )


def test_what_does_not_fit_an_old_scale_is_clipped():
    c, x = make_cast({"cast": "e4m3", "history": 4}), numbers((32, 64), spread=0)
    context = QuantContext(scale=torch.tensor(448.0))  # of a tensor that had an amax of 1
    q = quantize_in_context(x, c, -1, context)
    found = figures(gauge_operand(x, q.dequantize(), c, -1, context).tolist())
    assert_same(found, slow(x, q.dequantize(), blocks_of(x.shape, c, -1), lambda _: 1 / 448, 448.0))
    assert found["clipped"] == pytest.approx(0.95 * 0.317, abs=0.05), "of normal numbers beyond one sigma"
    assert found["largest"] >= found["clipped"]


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "e4m3"])
def test_blocks_that_are_not_finite_are_counted_and_left_out(name):
    c, x = cast(name), numbers((8, 128), spread=1)
    x[3, 5], x[6, 100] = math.nan, math.inf
    q = quantize(x, c)
    found = figures(gauge_operand(x, q.dequantize(), c, -1).tolist())
    if name == "e4m3":
        assert found["nonfinite"] == 1
        assert found["sqnr_db"] is None
        return
    scales = (q.scales * q.tensor_scale).numpy()
    assert_same(found, slow(x, q.dequantize(), blocks_of(x.shape, c, -1), lambda p: scales[p], c.element.max))
    assert found["nonfinite"] == 2 * c.block[1] / x.numel()
    assert found["scales"] == pytest.approx([np.nanmin(scales), np.nanmax(scales)])


def test_a_transform_is_part_of_what_comes_and_clamping_is_not():
    c = make_cast({"cast": "mxfp4", "hadamard": 32})
    x = numbers((16, 64))
    q = quantize(x, c)
    found = figures(gauge_operand(x, q.dequantize(), c, -1).tolist())
    scales = q.scales.numpy()
    turned = hadamard(x, 32, -1, ())
    assert_same(found, slow(turned, q.dequantize(), blocks_of(x.shape, c, -1), lambda p: scales[p], 6.0))
    c = make_cast({"cast": "fp4-row", "outliers": 0.97})
    q = quantize(x, c)
    found = figures(gauge_operand(x, q.dequantize(), c, -1).tolist())
    scales = q.scales.numpy()
    assert_same(found, slow(x, q.dequantize(), blocks_of(x.shape, c, -1), lambda p: scales[p], 6.0))
    assert found["clipped"] > 0.02


@pytest.mark.parametrize("power", [-100, 60])
def test_squares_of_small_and_large_numbers_are_summed_all_the_same(power):
    x, c = numbers((8, 64), spread=2), cast("mxfp8").having(scale_rule="floor")
    one, other = (
        figures(gauge_operand(t, quantize(t, c).dequantize(), c, -1).tolist()) for t in (x, x * 2.0**power)
    )
    assert other["sqnr_db"] == pytest.approx(one["sqnr_db"], rel=1e-6)
    assert other["rms"] == pytest.approx(one["rms"] * 2.0**power, rel=1e-6)


def test_large_tensors_are_walked_through_in_pieces():
    x = numbers((1100, 512))
    c = cast("mxfp4")
    q = quantize(x, c)
    scales = q.scales.numpy()
    expected = slow(x, q.dequantize(), blocks_of(x.shape, c, -1), lambda p: scales[p], 6.0)
    assert_same(figures(gauge_operand(x, q.dequantize(), c, -1).tolist()), expected)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_plain_conversion(name):
    x, c = numbers((20, 30), spread=8 if name == "fp16" else 2), cast(name)
    y = x.to(torch.bfloat16 if name == "bf16" else torch.float16)
    found = figures(gauge_operand(x, y, c, -1).tolist())
    assert_same(found, slow(x, y.float(), blocks_of(x.shape, c, -1), lambda _: 1.0, c.element.max))


STATE = ["bf16", "fp16-scaled", "coat", "dynamic8", "e4m3", "fp8-1x128", "nvfp4", "mxfp8"]


@pytest.mark.parametrize("name", STATE)
def test_state_is_gauged_as_it_is_stored(name):
    x, c = numbers((24, 300), spread=2), cast(name)
    stored = QuantizedState(x.shape, c)
    shown = []
    stored.gauge = lambda x, stored: shown.append(figures(gauge_state(x, stored).tolist()))
    stored.write(x)
    (found,) = shown
    scales, largest = stored.tensors.get("scales", torch.ones(())).float().numpy(), c.element.max
    if c.state.codebook:
        largest = 1.0
    elif c.scales.format in ("e8m0", "e4m3"):
        q = quantize(x, c)
        scales = (q.scales * q.tensor_scale).numpy()
    elif "scale" in stored.tensors:
        scales = stored.tensors["scale"].numpy()
    expected = slow(
        x, stored.read(), blocks_of(x.shape, c, -1), lambda p: scales[p] if scales.ndim else scales, largest
    )
    if name == "coat":
        expected |= {"largest": 0, "clipped": 0}
    assert_same(found, expected)
    assert found["sqnr_db"] is not None


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (), (7,)])
def test_tensors_of_any_shape(shape):
    x = torch.zeros(shape)
    found = figures(
        gauge(x, x, blocks_of(x.shape, cast("fp32"), -1) if shape else Blocks.of((), ())).tolist()
    )
    assert found["elements"] == x.numel()
    assert found["sqnr_db"] is None
    assert found["rms"] == 0


def test_a_product_is_compared_with_the_exact_one():
    a, b = numbers((6, 8), 1, 1).double(), numbers((6, 8), 2, 0.1).double()
    found = cosine_similarity(gauge_product((a + 0.01 * b).float(), a).tolist())
    c = (a + 0.01 * b).float().double().numpy().ravel()
    d = a.numpy().ravel()
    assert found["cosine"] == pytest.approx(c @ d / math.sqrt(c @ c) / math.sqrt(d @ d))
    assert found["sqnr_db"] == pytest.approx(10 * math.log10(d @ d / ((c - d) @ (c - d))))
    assert cosine_similarity(gauge_product(a, a).tolist())["sqnr_db"] is None
    nothing = torch.zeros(2, 2)
    assert cosine_similarity(gauge_product(nothing, nothing).tolist()) == {"cosine": None, "sqnr_db": None}
