"""Scales and codes in C have the bits of torch's operations, at every edge of an amax and for every code."""

import itertools

import pytest
import torch

from narrowgauge.formats import codes_of, decode, format
from narrowgauge.quantization import make_cast
from narrowgauge.quantization.block_scales import scales_from
from narrowgauge.quantization.passes import build, c_call
from narrowgauge.quantization.passes.in_c import block_scales, decoded, encoded, largest_finite
from quantization.casts import CASTS

pytestmark = pytest.mark.skipif(not build.compiler(), reason="there is no C compiler")
OF_SCALES = ("element", "scale", "scale_rule", "power_of_two", "headroom", "scale_rounding", "zero_scale")
OF_SCALES += ("tensor_scale", "scale_target", "candidates", "choose")
#: One cast for all that scales are computed from.
BY_SCALES = {tuple(c.values()[key] for key in OF_SCALES): name for name, c in CASTS.items() if not c.correct}


def amaxes():
    """Each exponent with the mantissas at which a rule changes its mind, 0, subnormals, infinity and NaN."""
    # 2 - 2^-k and the number below it: where the rule "even" goes up to the next power of two
    changes = [2**23 - 2 ** (22 - k) for k in (1, 2, 3, 6)]
    places = [0, 1, 2**19, 2**20 - 1, 2**21, 2**22 - 1, 2**22, 2**22 + 1, 2**23 - 1, *changes]
    mantissas = torch.tensor([*places, *(place - 1 for place in changes)])
    words = (torch.arange(256)[:, None] << 23 | mantissas).flatten().to(torch.int32)
    return torch.cat([words.view(torch.float32), torch.logspace(-8, 8, 1000)])


def bits(t):
    return t if t.dtype == torch.bool else torch.nan_to_num(t, nan=7e37).view(torch.int32)


def assert_same(found, expected):
    assert found.divides == expected.divides
    for mine, other in zip(found[:4], expected[:4], strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or (mine.shape == other.shape and torch.equal(bits(mine), bits(other)))


@pytest.mark.parametrize("name", BY_SCALES.values())
def test_scales_have_the_bits_of_torch(name, monkeypatch):
    """Under the amax of a tensor, or of each row; of each candidate."""
    c, amax = CASTS[name].to_nearest, amaxes().view(3, -1, 1)
    of_row = torch.tensor([0.0, 0.3, 3e38]).view(3, 1, 1)
    rows, tensors = (
        [of_row, of_row.expand_as(amax)],
        [torch.tensor(x) for x in (0.0, 1e-44, 0.3, 448.0, 3e38)],
    )
    for over, candidate in itertools.product(rows if c.has_row_scales else tensors, c.candidates or (0.0,)):
        monkeypatch.delenv("NARROWGAUGE_KERNELS", raising=False)
        found = block_scales(amax, c, over if c.tensor_scale != "none" else None, candidate)
        if c.scale_rounding != "nearest-even":
            assert found is None
            continue
        monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")
        over = over if c.tensor_scale != "none" else None
        assert_same(found, scales_from(amax, c, over=over, candidate=candidate))


def test_threads_share_scales_and_change_nothing(monkeypatch):
    cast, amax, over = make_cast("nvfp4"), amaxes(), torch.tensor(3.0)
    alone = block_scales(amax, cast, over)
    monkeypatch.setattr("narrowgauge.quantization.passes.in_c.A_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    together = block_scales(amax, cast, over)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(alone[:4], together[:4], strict=True))


def test_the_largest_finite_amax():
    assert largest_finite(amaxes()).item() == torch.finfo(torch.float32).max
    assert largest_finite(torch.tensor([torch.nan, 0.25, torch.inf])).item() == 0.25
    assert largest_finite(torch.tensor([torch.nan])).item() == 0


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e3m2", "e2m1", "int8"])
def test_codes_are_those_of_formats(name):
    element = format(name)
    codes = torch.arange(2**element.bits, dtype=torch.uint8).repeat(3).view(3, -1)
    values = decode(codes, element, torch.bfloat16)
    assert torch.equal(decoded(codes, element, torch.bfloat16).view(torch.int16), values.view(torch.int16))
    assert torch.equal(encoded(values, element), codes_of(values, element))
    assert encoded(values.float(), element).dtype == torch.uint8  # by `formats.codes_of`
    assert torch.equal(encoded(values.T, element), codes_of(values.T, element))


def test_a_tensor_without_storage_has_codes_without_a_call(monkeypatch):
    monkeypatch.setattr(c_call, "share", None)
    x = torch.empty(4, 8, dtype=torch.bfloat16, device="meta")
    codes = encoded(x, format("e4m3"))
    assert (codes.shape, codes.dtype, codes.device.type) == (x.shape, torch.uint8, "meta")
    assert decoded(codes, format("e4m3"), torch.bfloat16).dtype == torch.bfloat16
