"""Inputs of every kind, and a cast of them held against the exact oracle."""

import numpy as np
import torch

import narrowgauge as ng
from narrowgauge.formats import decode, random_stream
from narrowgauge.quantization.oracle import reference_quantize

LARGE, SMALL = (48, 80), (20, 40)  # the small one ends within a block of 16 and of 32, along both axes


def inputs(size: tuple[int, int] = LARGE) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(size, generator=g)
    return {
        "normal": normal,
        "bf16": normal.bfloat16(),
        "wide": normal * torch.exp2(torch.randint(-60, 60, size, generator=g)),
        "tiny": normal * 2.0**-125,
        "subnormal": normal * 2.0**-140,
        "huge": normal.sign() * 3.3e38,
        "zeros": torch.zeros(size),
        "one outlier": torch.zeros(size).index_put((torch.tensor(3), torch.tensor(7)), torch.tensor(-5.0)),
        "ragged": normal[:19, :37],
        "powers": torch.exp2(torch.arange(-64.0, 64.0)).reshape(4, 32) * 1.75,
        "vector": normal[0],
        "negative zero": torch.full((16, 32), -0.0),
    }


def assert_as_by_hand(x, cast, axis, key=None):
    """Codes, signs of zeros, scales and tensor scales of `ng.quantize` equal the oracle's.

    Args:
        x: The tensor.
        cast: The cast.
        axis: The axis that blocks lie along.
        key: The number of the random stream, for stochastic rounding.
    """
    stream = None if key is None else random_stream(0, 0, key)
    q = ng.quantize(x, cast, axis=axis, generator=stream)
    draws = scale_draws = None
    if stream is not None:
        draws = integers(stream.uniform(x.shape))
        scale_draws = integers(stream.of_scales().uniform(q.blocks.grid))
    hand = reference_quantize(x.float().numpy(), cast, axis, draws, scale_draws=scale_draws)
    values = decode(q.codes, cast.element).numpy()
    np.testing.assert_array_equal(values, hand.values)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(hand.values))
    by_hand = np.array(list(hand.scales.values()), np.float32)
    np.testing.assert_array_equal(q.scales.numpy().ravel(), by_hand)
    above = np.array(list(hand.tensor_scales.values()), np.float32)
    if cast.scales.outer_columns:  # one for several blocks
        np.testing.assert_array_equal(q.dequantize().numpy(), hand.dequantize().astype(np.float32))
        assert set(q.tensor_scale.flatten().tolist()) == set(above.tolist())
    else:
        np.testing.assert_array_equal(q.tensor_scale.expand(q.blocks.grid).numpy().ravel(), above)


def integers(uniform):
    """The 24 random bits of numbers in [0, 1)."""
    return (uniform.double() * 2**24).long().numpy()
