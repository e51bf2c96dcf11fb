"""What is not finite is found in every dtype: each code of narrow formats, and any place of wide ones."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowgauge.trainer.checkpoint import is_finite

ORACLE = {torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16}
EIGHT = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
ORACLE |= {getattr(torch, name): getattr(ml_dtypes, name) for name in EIGHT}


@pytest.mark.parametrize("dtype", ORACLE, ids=str)
def test_every_code_of_narrow_formats(dtype):
    unsigned, signed = (np.uint8, torch.uint8) if dtype.itemsize == 1 else (np.uint16, torch.int16)
    codes = np.arange(256**dtype.itemsize, dtype=unsigned)
    with np.errstate(invalid="ignore"):  # the oracle warns of the NaNs it is asked about
        finite = np.isfinite(codes.view(ORACLE[dtype]))
    good = torch.from_numpy(codes[finite].view(np.uint8)).view(signed).view(dtype)
    assert is_finite(good)
    for code in codes[~finite][:: dtype.itemsize**6]:  # all of 8 bits, and one in 64 of 16
        poisoned = good.clone().view(signed)
        poisoned[len(good) // 3] = int(code.view(np.int16)) if signed is torch.int16 else int(code)
        assert not is_finite(poisoned.view(dtype)), hex(code)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_any_place_of_wide_formats(dtype):
    x = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)  # a sum of these would overflow
    assert is_finite(x)
    for bad, position in ((math.nan, 0), (math.inf, 500), (-math.inf, 999)):
        poisoned = x.clone()
        poisoned[position] = bad
        for found in (poisoned, poisoned.reshape(10, 100).t(), torch.nn.Parameter(poisoned[position])):
            assert not is_finite(found)


def test_integers_empty_tensors_and_fp4_have_nothing_to_find():
    for dtype in (torch.uint8, torch.int64, torch.bool):
        assert is_finite(torch.ones(5, dtype=dtype))
    assert is_finite(torch.empty(0, 3))
    assert is_finite(torch.full((8,), 255, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    assert not is_finite(torch.tensor(math.nan).to(torch.float8_e4m3fn))
