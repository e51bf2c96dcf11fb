"""Walking through a tensor in chunks changes no number: every cast, both axes, shapes that fit no block."""

import pytest
import torch

from narrowgauge.formats import random_stream
from narrowgauge.quantization import QuantContext, blocks, cast_names, emulate, make_cast, quantize

CASTS = [make_cast(name) for name in cast_names() if make_cast(name).is_scaled]


SHAPES = [(320, 256), (150, 77), (1, 3000), (3000, 1), (4, 60, 33)]
WALKS = [
    pytest.param(c, shape, axis, rounding, id=f"{c.name}-{shape}-{axis}-{rounding}")
    for rounding in ("nearest-even", "stochastic")
    for axis in (-1, 0)
    for shape in SHAPES
    for c in CASTS
]
# Each cast with each shape, and each shape with both axes and roundings.
PAIRS = [
    (c.name, shape, (-1, 0)[(i + j) % 2], ("nearest-even", "stochastic")[(i + j) // 2 % 2])
    for i, c in enumerate(CASTS)
    for j, shape in enumerate(SHAPES)
]


@pytest.mark.tier("thorough", keep=PAIRS)
@pytest.mark.parametrize(("c", "shape", "axis", "rounding"), WALKS)
def test_chunks_give_the_numbers_of_the_full_tensor(c, shape, axis, rounding, monkeypatch):
    monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")  # the passes in C have no chunks
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[0].view(-1)[:1] = float("inf")
    c = make_cast({"cast": c.name, "rounding": rounding})

    def numbers():
        q = quantize(x, c, axis, generator=random_stream(1, 2, 3))
        operand, scale = emulate(x, c, axis, torch.bfloat16, QuantContext(random_stream(1, 2, 3)))
        scale = torch.ones(()) if scale is None else scale
        return [q.codes, q.scales, q.tensor_scale, operand.float(), scale]

    whole = numbers()
    monkeypatch.setattr(blocks, "CHUNK", 700)
    for a, b in zip(whole, numbers(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_a_large_tensor_is_walked_through_in_chunks():
    x = torch.zeros(3000, 256)
    sizes = [size for _, _, size in blocks.chunks(x)]
    assert len(sizes) > 1
    assert sum(sizes) == 3000
