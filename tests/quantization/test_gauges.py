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
from narrowgauge.quantization.blocks import blocks_of
from narrowgauge.quantization.gauges.bins import bins_of
from narrowgauge.quantization.gauges.figures import (
    cosine_similarity,
    figures,
    gauge_operand,
    gauge_product,
    gauge_state,
)
from narrowgauge.quantization.transforms import hadamard
from quantization.casts import BY_ROW


def numbers(shape, seed=0, spread=6.0):
    """Numbers over many binades, with zeros among them, float32."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.normal(0, spread, shape))
    x[rng.random(shape) < 0.05] = 0
    return torch.tensor(x, dtype=torch.float32)


def gauged(x, seen, c, axis=-1, *more):
    return figures(gauge_operand(x, seen, c, axis, *more).tolist())


def slow(x, y, blocks, scales, largest):
    """The definitions of the module's docstring, one block after the other, in float64.

    `scales` has an entry for each block, or one for all.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    n, binades, amaxes, at_largest, clipped, nonfinite = x.size, [0] * 16, [], 0, 0, 0
    for place in np.ndindex(*blocks.grid):
        block = tuple(slice(i * b, (i + 1) * b) for i, b in zip(place, blocks.size, strict=True))
        good = np.isfinite(x[block]) & np.isfinite(y[block])
        nonfinite += (~good).sum()
        xs, ys, m = x[block][good], y[block][good], (scales[place] if np.ndim(scales) else scales) * largest
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
    assert found["binades"] + [0] * (16 - len(found["binades"])) == expected["binades"]


X, NORMAL, BROKEN = numbers((33, 70)), numbers((32, 64), spread=0), numbers((8, 128), spread=1)
BROKEN[3, 5], BROKEN[6, 100] = math.nan, math.inf
FLOOR = {"cast": "mxfp8", "scale_rule": "floor"}
#: (cast, tensor, axis); no shape is a multiple of any block.
OPERANDS = [
    *((name, X, axis) for name in ("e4m3", "mxfp8", "mxfp4", "nvfp4") for axis in (-1, 0)),
    *(("e5m2", numbers((5, 260)), -1), ("fp8-row", numbers((5, 260)), 0), ("mxint8", X, -1)),
    *(("mxfp6-e2m3", numbers((5, 260)), 0), ("nvfp4-2d", X, 0), ("fp8-128x128", numbers((33, 270)), -1)),
    ("mxfp4", numbers((1100, 512)), -1),  # walked through in pieces
    # a transform is part of what comes, and pads 63 tokens or 40 inputs; clamping is not
    *(({"cast": "nvfp4", "hadamard": 32}, numbers((63, 40)), axis) for axis in (-1, 0)),
    ({"cast": "fp4-row", "outliers": 0.97}, X, -1),
    # of a tensor that had an amax of 1: what is above is clipped
    ({"cast": "e4m3", "history": 4}, NORMAL, -1),
    # blocks that are not finite are counted and left out
    *((name, BROKEN, -1) for name in ("mxfp8", "nvfp4")),
    # the squares of small and large numbers are summed all the same
    *((FLOOR, BROKEN.nan_to_num(0, 0, 0) * 2.0**power, -1) for power in (0, -100, 60)),
    *(("bf16", numbers((20, 30), spread=2), -1), ("fp16", numbers((20, 30), spread=8), -1)),
]


@pytest.mark.parametrize(("table", "x", "axis"), OPERANDS)
def test_an_operand_is_gauged_as_numpy_does(table, x, axis):
    c, before, scales = make_cast(table), x, np.ones(())
    context = QuantContext(scale=torch.tensor(448.0) if c.history else None)
    values, scale = emulate(x, c, axis, torch.float16 if table == "fp16" else torch.bfloat16, context)
    seen = values.float() * (1 if scale is None else scale)
    if c.is_scaled:
        q = quantize_in_context(x, c, axis, context)
        scales = (q.scales * q.tensor_scale).numpy()
        assert torch.equal(q.dequantize().nan_to_num(), seen.nan_to_num())
    if c.hadamard:
        padded = torch.nn.functional.pad(x, (0, 24) if axis == -1 else (0, 0, 0, 1))
        before = hadamard(padded, 32, axis)
    found = gauged(x, seen, c, axis, context)
    assert_same(found, slow(before, seen, blocks_of(before.shape, c, axis), scales, c.element.max))
    if c.is_scaled:
        assert found["scales"] == pytest.approx([np.nanmin(scales), np.nanmax(scales)])
    assert found["elements"] == before.numel()


@pytest.mark.parametrize("name", ["bf16", "fp16-scaled", "coat", "dynamic8", "fp8-1x128", "nvfp4", BY_ROW])
def test_state_is_gauged_as_it_is_stored(name):
    x, c = numbers((24, 300), spread=2), make_cast(name)
    stored, shown = QuantizedState(x.shape, c), []
    stored.gauge = lambda x, stored: shown.append(figures(gauge_state(x, stored).tolist()))
    stored.write(x)
    scales = stored.tensors.get("scale", stored.tensors.get("scales", torch.ones(()))).float().numpy()
    if c.tensor_scale != "none":
        q = quantize(x, c)
        scales = (q.scales * q.tensor_scale).numpy()
    largest = 1.0 if c.codebook else c.element.max
    expected = slow(x, stored.read(), blocks_of(x.shape, c, -1), scales, largest)
    (found,) = shown
    assert_same(found, expected | ({"largest": 0, "clipped": 0} if name == "coat" else {}))
    assert found["sqnr_db"] is not None


def test_a_product_is_compared_with_the_exact_one():
    a, b = numbers((6, 8), 1, 1).double(), numbers((6, 8), 2, 0.1).double()
    found = cosine_similarity(gauge_product((a + 0.01 * b).float(), a).tolist())
    c, d = (a + 0.01 * b).float().double().numpy().ravel(), a.numpy().ravel()
    assert found["cosine"] == pytest.approx(c @ d / math.sqrt(c @ c) / math.sqrt(d @ d))
    assert found["sqnr_db"] == pytest.approx(10 * math.log10(d @ d / ((c - d) @ (c - d))))
    assert cosine_similarity(gauge_product(a, a).tolist())["sqnr_db"] is None
    nothing = torch.zeros(2, 2)
    assert cosine_similarity(gauge_product(nothing, nothing).tolist()) == {"cosine": None, "sqnr_db": None}


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "mxfp4", "mxfp6-e2m3", "mxfp6-e3m2", "mxint8", "nvfp4"])
def test_every_magnitude_is_in_its_bin_of_a_histogram(name):
    c, x = cast(name), torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    seen = quantize(x, c).dequantize()
    found = figures(gauge_operand(x, seen, c, -1).tolist(), c.element)["histogram"]
    assert sum(found["before"]) + found["zeros"][0] == x.numel()
    assert sum(found["after"]) + found["zeros"][1] == x.numel()
    assert found["zeros"][1] == int((seen == 0).sum())
    assert 2.0 ** bins_of(c.element).low < c.element.smallest_subnormal


def test_a_mean_and_kept_channels_are_parts_of_an_operand():
    """The blocks are those of the rest, the errors those of both parts."""
    x = numbers((48, 80), spread=0)
    x[:, [3, 17]] *= 40
    shifted = x + 4 * numbers((80,), seed=1, spread=0)
    kept = make_cast({"cast": "nvfp4", "keep_channels": 0.1, "keep_cast": "mxfp8"})
    for given, c in ((x, kept), (shifted, make_cast({"cast": "nvfp4", "center": "tokens"}))):
        seen, scale = emulate(given, c, -1, torch.float32)
        assert scale is None
        read = gauged(given, seen, c)
        channels = quantize(given, c).channels
        rest = given - given.mean(0) if channels is None else given[:, ~channels]
        assert read["amax"][-1] == pytest.approx(rest.abs().max().item(), rel=1e-5)
        if channels is not None:
            error = (seen - given).square().sum()
            sqnr = 10 * (given.square().sum() / error).log10().item()
            assert read["sqnr_db"] == pytest.approx(sqnr, abs=1e-3)
            assert read["zeros"] == pytest.approx((seen == 0).float().mean().item(), abs=1e-6)
            underflow = ((seen == 0) & (given != 0)).float().mean().item()
            assert read["underflow"] == pytest.approx(underflow, abs=1e-6)
