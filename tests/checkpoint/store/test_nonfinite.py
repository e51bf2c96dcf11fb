import math

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowgauge.checkpoint import is_finite

ORACLE = {
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
    torch.float8_e8m0fnu: ml_dtypes.float8_e8m0fnu,
}


@pytest.mark.parametrize("dtype", ORACLE, ids=str)
def test_every_code_of_narrow_formats(dtype):
    unsigned, signed = (np.uint8, torch.uint8) if dtype.itemsize == 1 else (np.uint16, torch.int16)
    codes = np.arange(256**dtype.itemsize, dtype=unsigned)
    with np.errstate(invalid="ignore"):  # the oracle warns of the NaNs it is asked about
        finite = np.isfinite(codes.view(ORACLE[dtype]))
    good = torch.from_numpy(codes[finite].view(np.uint8)).view(signed).view(dtype)
    assert is_finite(good)
    for code in codes[~finite][:: dtype.itemsize**3]:  # all of 8 bits, and one in eight of 16
        poisoned = good.clone().view(signed)
        poisoned[len(good) // 3] = int(code.view(np.int16)) if signed is torch.int16 else int(code)
        assert not is_finite(poisoned.view(dtype)), hex(code)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 500, 999])
def test_wide_formats(dtype, bad, position):
    x = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)  # a sum of these would overflow
    assert is_finite(x)
    x[position] = bad
    assert not is_finite(x)
    assert not is_finite(x.reshape(10, 100).t())


def test_integers_empty_tensors_and_fp4_have_nothing_to_find():
    for dtype in (torch.uint8, torch.int64, torch.bool):
        assert is_finite(torch.ones(5, dtype=dtype))
    assert is_finite(torch.empty(0, 3))
    assert is_finite(torch.full((8,), 255, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))


def test_zero_dim_and_parameters():
    assert is_finite(torch.nn.Parameter(torch.tensor(1.0)))
    assert not is_finite(torch.nn.Parameter(torch.tensor(math.nan)))
    assert not is_finite(torch.tensor(math.nan).to(torch.float8_e4m3fn))
