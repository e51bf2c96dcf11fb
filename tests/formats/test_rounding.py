"""Every format against ml_dtypes on every bfloat16 and float16 value, and against the exact oracle."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import narrowgauge as ng
from narrowgauge.formats import decode, encode, pack, torch_dtype, unpack
from narrowgauge.formats.rounding import round_finite_
from narrowgauge.system.errors import UserError
from oracle.rounding import round_scalar

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
NARROW = [n for n in ML_DTYPES if ng.format(n).bits <= 8]
OURS = ("e1m2", "int4", "e5m3")  # ml_dtypes has no such format


def all_16_bit(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@pytest.mark.parametrize("name", ML_DTYPES)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_every_16_bit_input_rounds_as_ml_dtypes_does_but_saturates(name, source):
    fmt, x = ng.format(name), all_16_bit(source)
    with np.errstate(all="ignore"):
        expected = x.double().numpy().astype(np.float32).astype(ML_DTYPES[name]).astype(np.float64)
        if name in ("e2m1", "e2m3", "e3m2"):  # ml_dtypes has no NaN to give there
            expected[~np.isfinite(x.double().numpy())] = np.nan
    overflow = (x.double().abs() > fmt.max).numpy() & x.isfinite().numpy()
    limit = np.copysign(fmt.max, x.double().numpy())
    expected = np.where(overflow & (limit > 0 if not fmt.signed else True), limit, expected)
    got = ng.round_to(x.double(), name).numpy()
    np.testing.assert_array_equal(got, expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(expected[finite]))


@pytest.mark.parametrize("name", NARROW)
def test_every_code_decodes_as_in_ml_dtypes_and_encodes_back(name, monkeypatch):
    fmt = ng.format(name)
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    expected = codes.view(ML_DTYPES[name]).astype(np.float32)
    values = decode(torch.from_numpy(codes), fmt)
    np.testing.assert_array_equal(values.numpy(), expected)
    monkeypatch.setattr("narrowgauge.formats.codes.is_gpu", lambda _: True)  # torch's conversion, as there
    np.testing.assert_array_equal(decode(torch.from_numpy(codes), fmt).numpy(), expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(encode(values, fmt).numpy()[number], codes[number])
    assert (encode(values, fmt).numpy()[~number] == fmt.nan_code).all()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_16_bit_codes_are_the_bits_torch_stores(name):
    fmt = ng.format(name)
    x = all_16_bit(torch_dtype(fmt))
    x = x[~x.isnan()]
    expected = x.view(torch.int16).to(torch.int32) & 0xFFFF
    assert torch.equal(encode(x.double(), fmt), expected)


EVERY = sorted([*ML_DTYPES, *OURS])


@given(st.floats(width=64), st.sampled_from(EVERY), st.sampled_from(ng.formats.ROUNDINGS))
def test_fast_rounding_equals_the_oracle_on_any_float(x, name, rounding):
    fmt = ng.format(name)
    found = ng.round_to(torch.tensor(x, dtype=torch.float64), fmt, rounding, torch.tensor(0.375)).item()
    assert same(found, round_scalar(x, fmt, rounding, 0.375))


@pytest.mark.parametrize("random_bits", [1, 4, 8])
def test_few_random_bits_round_up_where_they_and_the_fraction_reach_one(random_bits):
    """f + r / 2^n >= 1 in whole numbers: E2M1 between 1 and 1.5, f in sixteenths, every r of n bits."""
    sixteenths, r = torch.arange(16), torch.arange(2**random_bits)[:, None]
    x = (1 + sixteenths / 32).repeat(len(r), 1)
    uniform = ((r + 0.5) / 2**random_bits).expand_as(x)  # what lies below the n bits does not count
    want = torch.where(sixteenths * 2**random_bits + 16 * r >= 16 * 2**random_bits, 1.5, 1.0)
    assert torch.equal(round_finite_(x, ng.format("e2m1"), "stochastic", uniform, random_bits), want)


@pytest.mark.parametrize("name", ["e2m1", "int4", "e3m2", "e4m3"])
def test_packing_round_trips(name):
    fmt = ng.format(name)
    for width in (1, 2, 3, 4, 7, 32):
        codes = torch.randint(0, 2**fmt.bits, (3, width), dtype=torch.uint8)
        packed = pack(codes, fmt)
        assert packed.shape == (3, math.ceil(width * fmt.bits / 8))
        assert torch.equal(unpack(packed, fmt, width), codes)


def test_packing_order_is_low_nibble_first_and_little_endian_bits():
    fp4 = pack(torch.tensor([[0x1, 0x2, 0xF, 0x8]], dtype=torch.uint8), ng.format("e2m1"))
    assert fp4.tolist() == [[0x21, 0x8F]]
    codes = [0b000001, 0b100000, 0b111111, 0b010101]
    word = sum(c << 6 * i for i, c in enumerate(codes))
    fp6 = pack(torch.tensor([codes], dtype=torch.uint8), ng.format("e3m2"))
    assert bytes(fp6[0].tolist()) == word.to_bytes(3, "little")


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"unknown format 'e4m4'; the nearest is 'e4m3'"):
        ng.format("e4m4")
    with pytest.raises(UserError, match=r"unknown rounding 'nearest'; the nearest is 'nearest-even'"):
        ng.round_to(torch.ones(1), "e4m3", "nearest")
