"""Scales and codes in C have the bits of torch's operations, at every edge of an amax and for every code."""

import pytest
import torch

from narrowgauge.formats import codes_of, decode, format
from narrowgauge.quantization import make_cast
from narrowgauge.quantization.block_scales import scales_from
from narrowgauge.quantization.passes import build, c_call
from narrowgauge.quantization.passes.in_c import block_scales, decoded, encoded, largest_finite

pytestmark = pytest.mark.skipif(not build.compiler(), reason="there is no C compiler")
CASTS = [
    *({"cast": name, "scale_rule": r} for name in ("mxfp8", "mxfp4", "mxint8") for r in ("floor", "ceil")),
    *({"cast": name, "scale_rule": r} for name in ("mxfp8", "mxfp4", "mxint8") for r in ("even", "rceil")),
    {"cast": "mxfp4", "scale_rule": "rceil", "headroom": 0.75},
    {"cast": "e4m3", "power_of_two": True},
    *({"cast": name} for name in ("e4m3", "e5m2", "nvfp4", "nvfp4-2d")),
    *({"cast": "nvfp4", "zero_scale": zero} for zero in ("zero", "one", "smallest")),
    {"cast": "nvfp4", "headroom": 16 / 17, "scale_target": 256.0},
    *({"cast": "nvfp4", "scale": name, "tensor_scale": "none"} for name in ("bf16", "e4m3", "e5m3")),
    *({"cast": "nvfp4", "scale": name, "headroom": 0.9} for name in ("bf16", "e5m3")),
    *({"cast": "nvfp4", "scale": "e5m3", "zero_scale": zero} for zero in ("zero", "one", "smallest")),
    {"cast": "nvfp4", "scale": "bf16", "scale_target": 1000.0},
]
ROUNDED = [table for table in CASTS if table["cast"] == "nvfp4"]


def amaxes():
    """Each exponent with the mantissas at which a rule changes its mind, 0, subnormals, infinity and NaN."""
    mantissas = torch.tensor([0, 1, 2**19, 2**20 - 1, 2**21, 2**22 - 1, 2**22, 2**22 + 1, 2**23 - 1])
    words = (torch.arange(256)[:, None] << 23 | mantissas).flatten().to(torch.int32)
    return torch.cat([words.view(torch.float32), torch.logspace(-8, 8, 999)])


def bits(t):
    return t if t.dtype == torch.bool else torch.nan_to_num(t, nan=7e37).view(torch.int32)


@pytest.mark.parametrize("over", [0.0, 1e-44, 1e-38, 0.3, 448.0, 3e38])
@pytest.mark.parametrize("table", CASTS, ids=str)
def test_scales_have_the_bits_of_torch(table, over, monkeypatch):
    cast, amax, largest = make_cast(table), amaxes(), torch.tensor(over)
    found = block_scales(amax, cast, largest)
    assert found is not None
    monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")
    expected = scales_from(amax, cast, over=largest)
    assert_same(found, expected)


def assert_same(found, expected):
    assert found.divides == expected.divides
    for mine, other in zip(found[:4], expected[:4], strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or (mine.shape == other.shape and torch.equal(bits(mine), bits(other)))


@pytest.mark.parametrize("table", ROUNDED, ids=str)
def test_scales_of_candidates_and_under_scales_of_rows_have_the_bits_of_torch(table, monkeypatch):
    amax = amaxes().view(3, -1, 1)
    two = {"candidates": [6, 4], "choose": "mse"}
    rows = "none" if table.get("tensor_scale") == "none" else "row"
    for keys in (two, {"tensor_scale": rows}, two | {"tensor_scale": rows}):
        cast = make_cast(table | keys)
        of_row = torch.tensor([0.0, 0.3, 3e38]).view(3, 1, 1)
        of_tensor, by_row = [torch.tensor(1.7)], [of_row, of_row.expand_as(amax)]
        for over in of_tensor if cast.scales.outer == "tensor" else by_row:
            for candidate in cast.choice.candidates or (0.0,):
                monkeypatch.delenv("NARROWGAUGE_KERNELS", raising=False)
                found = block_scales(amax, cast, over, candidate)
                assert found is not None
                monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")
                assert_same(found, scales_from(amax, cast, over=over, candidate=candidate))


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


def test_scales_that_are_rounded_stochastically_are_left_to_torch():
    cast = make_cast({"cast": "nvfp4", "scale_rounding": "stochastic"})
    assert block_scales(amaxes(), cast, torch.tensor(1.0)) is None


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
