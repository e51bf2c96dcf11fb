"""Inputs of every kind, and a cast of them held against the exact oracle."""

import numpy as np
import torch

from narrowgauge.formats import decode, random_stream
from narrowgauge.quantization import QuantContext, emulate, quantize_in_context
from oracle import reference_quantize

SMALL = (17, 33)  # ends within a block of 16 and of 32, along both axes


def inputs(size: tuple[int, int] = SMALL) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(size, generator=g)
    # amaxes just below and at 2 - 2^-k, where the rule "even" goes up to the next power of two
    steps = 2 - torch.exp2(-torch.arange(1.0, 9.0))
    edges = torch.stack([steps, torch.nextafter(steps, torch.ones(8))]).flatten()[: size[0], None]
    powers = torch.exp2(torch.arange(-64.0, 64.0)).reshape(4, 32) * 1.75
    return {
        "normal": normal,
        "bf16": normal.bfloat16(),
        "wide": normal * torch.exp2(torch.randint(-60, 60, size, generator=g)),
        "tiny": normal * 2.0**-125,
        "subnormal": normal * 2.0**-140,
        "huge": normal.sign() * 3.3e38,
        "zeros": torch.zeros(size),
        "one outlier": torch.zeros(size).index_put((torch.tensor(3), torch.tensor(7)), torch.tensor(-5.0)),
        "powers": powers,
        "edges": edges * torch.cat([torch.ones(1), torch.full((size[1] - 1,), 0.3)]),
        "vector": normal[0],
        "negative zero": torch.full((16, 32), -0.0),
    }


def assert_as_by_hand(x, cast, axis, signs=None):
    """Codes, signs of zeros, scales and what is read back equal the oracle's, and an emulated operand is it.

    Args:
        x: The tensor.
        cast: The cast; what it rounds stochastically takes the bits of a stream.
        axis: The axis that blocks lie along.
        signs: The signs of a transform whose cast does not name them.
    """
    stream = random_stream(0, 0, 7)
    context = QuantContext(random=stream, signs=None if signs is None else torch.tensor(signs))
    q = quantize_in_context(x, cast, axis, context)
    draws, of_scales = stream.uniform(q.codes.shape), stream.of_scales().uniform(q.blocks.grid)
    hand = reference_quantize(
        x.float().numpy(),
        cast,
        axis,
        integers(draws),
        signs=signs or (),
        dtype="bf16" if x.dtype == torch.bfloat16 else "fp32",
        scale_draws=integers(of_scales),
    )
    values = decode(q.codes, cast.element).numpy()
    np.testing.assert_array_equal(values, hand.values)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(hand.values))
    np.testing.assert_array_equal(q.scales.numpy().ravel(), np.array([*hand.scales.values()], np.float32))
    above = np.array([*hand.tensor_scales.values()], np.float32)
    if cast.outer_columns:  # one for several blocks
        assert set(q.tensor_scale.flatten().tolist()) == set(above.tolist())
    else:
        np.testing.assert_array_equal(q.tensor_scale.expand(q.blocks.grid).numpy().ravel(), above)
    if q.mean is not None:
        np.testing.assert_array_equal(q.mean.numpy().ravel(), hand.mean.astype(np.float32))
    channels = () if q.channels is None else q.channels.nonzero().flatten().tolist()
    assert tuple(channels) == hand.channels
    stored = q.dequantize()
    most = torch.finfo(torch.float32).max  # where the oracle ends, and an element times its scale need not
    np.testing.assert_array_equal(stored.clamp(-most, most).numpy(), hand.dequantize().astype(np.float32))
    operand, scale = emulate(x, cast, axis, torch.bfloat16, context)
    assert (operand.dtype == torch.float32) == cast.has_wide_operand
    assert (scale is not None) == cast.scales_result
    expected = stored + torch.tensor(hand.rest).float() if cast.compensate else stored
    if scale is None:  # bf16 holds each product of an element and a scale, but in part of its subnormals
        expected = expected.to(operand.dtype)
    assert torch.equal(operand.float() * (1.0 if scale is None else scale), expected.float())


def integers(uniform):
    """The 24 random bits of numbers in [0, 1)."""
    return (uniform.double() * 2**24).long().numpy()
