"""On a CPU large tensors are walked through in chunks: the same bits as element by element."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.formats import RandomStream, decode, encode, random_stream, round_finite
from narrowgauge.formats.rounding import CHUNK

LARGE = 2 * CHUNK + 77


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2", "e2m1", "int8", "e8m0"])
def test_chunks_are_rounded_and_encoded_as_their_elements_are(name):
    x, fmt, bits = torch.randn(LARGE) * 3, ng.format(name), random_stream(1, 2, 3)
    x = x.abs() + 1e-6 if name == "e8m0" else x
    for rounding in ng.formats.ROUNDINGS:
        parts = [
            round_finite(part, fmt, rounding, RandomStream(bits.key, 1000 * i))
            for i, part in enumerate(x.split(1000))
        ]
        assert torch.equal(round_finite(x, fmt, rounding, bits), torch.cat(parts))
    rounded = ng.round_to(x, fmt)
    codes = encode(rounded, fmt)
    assert torch.equal(codes, torch.cat([encode(part, fmt) for part in rounded.split(1000)]))
    assert torch.equal(decode(codes, fmt), rounded)
