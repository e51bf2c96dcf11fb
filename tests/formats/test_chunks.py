"""On a CPU large tensors are walked through in chunks: the same bits as element by element."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.formats import RandomStream, decode, encode, random_stream, round_finite
from narrowgauge.formats.rounding import CHUNK

LARGE = 2 * CHUNK + 77


def small_parts(x):
    return x.split(1000)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "int8"])
@pytest.mark.parametrize("rounding", ["nearest-even", "half-away", "toward-zero", "stochastic"])
def test_rounding(name, rounding):
    x, fmt = torch.randn(LARGE) * 3, ng.format(name)
    bits = random_stream(1, 2, 3)
    whole = round_finite(x, fmt, rounding, bits)
    parts = [
        round_finite(part, fmt, rounding, RandomStream(bits.key, 1000 * i))
        for i, part in enumerate(small_parts(x))
    ]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2", "e2m1", "int8", "e8m0"])
def test_codes(name):
    fmt = ng.format(name)
    x = ng.round_to(torch.randn(LARGE).abs() + 1e-6 if name == "e8m0" else torch.randn(LARGE), fmt)
    codes = encode(x, fmt)
    assert torch.equal(codes, torch.cat([encode(part, fmt) for part in small_parts(x)]))
    assert torch.equal(decode(codes, fmt), x)
