"""Codes, scales, what is read back and emulated operands equal the exact oracle's, bit for bit."""

import numpy as np
import pytest
import torch

from narrowgauge.formats import decode, random_stream
from narrowgauge.quantization import Cast, QuantContext, emulate, make_cast, quantize, quantize_in_context
from oracle import reference_quantize
from quantization.casts import CASTS, EDEN, FOUR_OVER_SIX
from support.covering import covering
from support.fault_table import case

SMALL = (17, 33)  # ends within a block of 16 and of 32, along both axes
#: Keys that are one property with each of their values; of all others only that they are there counts.
BY_VALUE = ("element", "scale", "tensor_scale", "scale_rule", "rounding", "scale_rounding", "zero_scale")
BY_VALUE += ("choose",)
#: What a kind of input shows.
SHOWS = {
    **dict.fromkeys(("normal", "bf16"), "ordinary numbers"),
    **dict.fromkeys(("wide", "huge"), "large ones"),
    **dict.fromkeys(("tiny", "subnormal"), "small ones"),
    **dict.fromkeys(("zeros", "negative zero", "one outlier"), "zeros"),
    **dict.fromkeys(("powers", "edges"), "edges of binades"),
}


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


def properties(c: Cast) -> set[object]:
    """The keys of a cast, some with their values, and the kind of its blocks."""
    values = c.values()
    block = "tensor" if c.block is None else "2d" if c.block[0] > 1 else "columns" if c.block[1] else "row"
    return {(key, str(values[key])) if key in BY_VALUE else key for key in c.changed_keys} | {block}


KINDS = {(kind, axis): (shown, axis) for axis in (-1, 0) for kind, shown in SHOWS.items()}
COVERED = covering({name: properties(c) for name, c in CASTS.items()}, KINDS)


def is_possible(name: str, kind: str) -> bool:
    """Whether float32 holds what is rounded: the largest numbers less their mean overflow."""
    return kind != "huge" or not CASTS[name].center


def cases():
    """Each cast once; in the thorough tier each property of a cast along both axes of each kind of input."""
    for n, name in enumerate(CASTS):
        mine = [given for cast, given in COVERED if cast == name and is_possible(name, given[0])]
        for given in mine:
            marks = () if given == mine[n % len(mine)] else pytest.mark.tier("thorough")
            yield pytest.param(name, *given, marks=marks, id=f"{name}-{given[0]}-{given[1]}")


@case("E2", tier="quick")
@pytest.mark.parametrize(("name", "kind", "axis"), list(cases()))
def test_a_cast_equals_the_oracle(name, kind, axis):
    assert_as_by_hand(inputs()[kind], CASTS[name], axis)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("name", CASTS)
def test_a_cast_of_every_input_equals_the_oracle(name):
    for kind, axis in KINDS:
        if is_possible(name, kind):
            assert_as_by_hand(inputs()[kind], CASTS[name], axis)


@pytest.mark.parametrize("name", ["e4m3", "fp8-row", "mxfp4", "nvfp4"])
def test_a_cast_of_a_vector_equals_the_oracle(name):
    assert_as_by_hand(inputs()["vector"], make_cast(name), -1)


@pytest.mark.parametrize(
    ("table", "signs"),
    [
        ({"cast": "nvfp4", "hadamard": 16}, None),
        ({"cast": "mxfp4", "hadamard": 4, "signs": [1, -1, -1, 1]}, None),
        (EDEN | {"hadamard": 64, "signs": "random"}, [-1 if k % 5 in (0, 3) else 1 for k in range(64)]),
    ],
)
def test_a_transform_equals_the_oracle(table, signs):
    """Small integers have exact transforms; a projection has the same groups."""
    x = (inputs((6, 96))["normal"] * 4).round()
    assert_as_by_hand(x, make_cast(table), -1, signs)


def test_random_bits_are_those_of_a_generator_or_given():
    """A cast that needs the bits of an element more than once draws them in advance, once."""
    x, c = inputs()["normal"], make_cast(FOUR_OVER_SIX | {"rounding": "stochastic"})
    drawn = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    found = [quantize(x, c, generator=bits) for bits in (torch.Generator().manual_seed(0), drawn)]
    assert torch.equal(found[0].dequantize(), found[1].dequantize())
