"""Scales and codes in C have the bits of torch's operations, at every edge of an amax and for every code."""

import pytest
import torch

from kernels.common import assert_same, needs_c, same_bits
from narrowgauge.formats import decode, format, torch_dtype
from narrowgauge.quantization import DEFAULT_CONTEXT
from narrowgauge.quantization.blocks import Blocks
from narrowgauge.quantization.passes import in_c, in_torch
from narrowgauge.quantization.passes.in_c import decoded
from narrowgauge.quantization.passes.in_torch import Split
from quantization.casts import CASTS

pytestmark = needs_c
OF_SCALES = ("element", "scale", "scale_rule", "power_of_two", "headroom", "scale_rounding", "zero_scale")
OF_SCALES += ("tensor_scale", "scale_target", "candidates", "choose")
NEAREST = {n: c for n, c in CASTS.items() if c.to_nearest.scale_rounding == "nearest-even" and not c.correct}
#: One cast for all that scales are computed from.
BY_SCALES = {tuple(c.values()[key] for key in OF_SCALES): name for name, c in NEAREST.items()}


def amaxes():
    """Each exponent with the mantissas at which a rule changes its mind, 0, subnormals, infinity and NaN."""
    # 2 - 2^-k and the number below it: where the rule "even" goes up to the next power of two
    changes = [2**23 - 2 ** (22 - k) for k in (1, 2, 3, 6)]
    places = [0, 1, 2**19, 2**20 - 1, 2**21, 2**22 - 1, 2**22, 2**22 + 1, 2**23 - 1, *changes]
    mantissas = torch.tensor([*places, *(place - 1 for place in changes)])
    words = (torch.arange(256)[:, None] << 23 | mantissas).flatten().to(torch.int32)
    return torch.cat([words.view(torch.float32), torch.logspace(-8, 8, 1000)])


def scales_by(engine, amax, cast, over):
    """The scales of blocks of one element, each its amax."""
    blocks = Blocks.of(amax.shape, (1,) * amax.ndim)
    return engine.scales(Split(amax, blocks, cast, -1, DEFAULT_CONTEXT, amax, over))[0]


@pytest.mark.parametrize("name", BY_SCALES.values())
def test_scales_have_the_bits_of_torch(name):
    """Under the amax of a tensor, or of each row; of the best candidate."""
    c, amax = CASTS[name].to_nearest, amaxes().view(3, -1, 1)
    of_row = torch.tensor([0.0, 0.3, 3e38]).view(3, 1, 1)
    overs = [torch.tensor(x) for x in (0.0, 1e-44, 0.3, 448.0, 3e38)] if c.tensor_scale != "none" else [None]
    for over in [of_row, of_row.expand_as(amax)] if c.has_row_scales else overs:
        found, expected = (scales_by(engine, amax, c, over) for engine in (in_c, in_torch))
        assert found.divides == expected.divides
        assert_same(found[:4], expected[:4])


def test_the_largest_finite_amax():
    def largest(x):
        amax, top = in_c.largest(x, Blocks.of(x.shape, (1,)))
        assert same_bits(amax, x)
        return top.item()

    assert largest(amaxes()) == torch.finfo(torch.float32).max
    assert largest(torch.tensor([torch.nan, 0.25, torch.inf])) == 0.25
    assert largest(torch.tensor([torch.nan])) == 0


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e3m2", "e2m1", "int8"])
def test_codes_are_those_of_formats(name):
    element = format(name)
    codes = torch.arange(2**element.bits, dtype=torch.uint8).repeat(3).view(3, -1)
    values = decode(codes, element, torch.bfloat16)
    assert torch.equal(decoded(codes, element, torch.bfloat16).view(torch.int16), values.view(torch.int16))
    same = codes.T if (fp8 := torch_dtype(element)) is None else values.T.to(fp8).view(torch.uint8)
    assert same_bits(decoded(same, element, torch.bfloat16), values.T)
