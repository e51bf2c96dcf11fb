"""Histograms of small tensors, where every element is in the sample, against counts made one by one."""

import pytest
import torch

from narrowgauge.quantization import cast, quantize
from narrowgauge.quantization.gauges.bins import bins_of
from narrowgauge.quantization.gauges.figures import figures, gauge_operand


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "mxfp4", "mxfp6-e2m3", "mxfp6-e3m2", "mxint8", "nvfp4"])
def test_every_magnitude_is_in_its_bin(name):
    c = cast(name)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    q = quantize(x, c, -1)
    found = figures(gauge_operand(x, q.dequantize(), c, -1).tolist(), c.element)["histogram"]
    assert sum(found["before"]) + found["zeros"][0] == x.numel()
    assert sum(found["after"]) + found["zeros"][1] == x.numel()
    assert found["zeros"][1] == int((q.dequantize() == 0).sum())


def test_the_numbers_of_e2m1_lie_at_the_edges_of_their_bins():
    c, x = cast("mxfp4"), torch.tensor([[6.0, 0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0] * 4])
    found = figures(gauge_operand(x, x, c, -1).tolist(), c.element)["histogram"]
    n = found["per_octave"]
    held = [b + found["first"] for b, count in enumerate(found["after"]) if count]
    assert [2.0 ** (b // n) * (1 + b % n / n) for b in held] == [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert (found["zeros"], found["before"]) == ([4, 4], found["after"])


def test_bins_fit():
    for name in ("e4m3", "e5m2", "mxfp4", "mxint8", "fp16"):
        bins = bins_of(cast(name).element)
        assert 2.0**bins.low < cast(name).element.smallest_subnormal
