"""Codes, scales, what is read back and emulated operands equal the exact oracle's, bit for bit."""

import pytest
import torch

from narrowgauge.quantization import Cast, make_cast, quantize
from quantization.by_hand import assert_as_by_hand, inputs
from quantization.casts import CASTS, EDEN, FOUR_OVER_SIX
from support.covering import covering
from support.fault_table import case

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
