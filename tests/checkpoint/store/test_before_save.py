"""Before anything is written: what is not finite is found in every dtype, and the disk has space."""

import math
import os

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import SaveError, is_finite, require_space_for_run, save
from narrowgauge.trainer.checkpoint.store.before_save import DiskSpace, free_space, require_space
from support.fault_table import case

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


def test_a_file_system_without_a_fixed_number_of_inodes_is_not_full():
    assert not DiskSpace(10, 4).fits_in(DiskSpace(10, 3))
    assert DiskSpace(10, 4).fits_in(DiskSpace(10, None))


@case("D2", tier="quick")
def test_too_little_is_refused_with_needed_and_free(tmp_path):
    require_space(tmp_path / "not" / "there" / "yet", DiskSpace(1 << 20, 10))
    words = r"needs 4,194,304\.0 TiB and 1 inodes .* its disk has [\d,.]+ \w+ .*free"
    with pytest.raises(SaveError, match=words):
        require_space(tmp_path, DiskSpace(1 << 62, 1))
    if os.statvfs(tmp_path).f_files:  # other file systems make inodes as they need them
        with pytest.raises(SaveError, match=rf"and {1 << 50} inodes .* and \d+ inodes free"):
            require_space(tmp_path, DiskSpace(0, 1 << 50))


def test_a_run_needs_one_checkpoint_more_than_it_keeps(tmp_path):
    free = free_space(tmp_path)
    with pytest.raises(UserError, match=r"for 3 more checkpoints of .* \(checkpoint.keep = 2, and one"):
        require_space_for_run(tmp_path, DiskSpace(free.bytes // 2, 1), 2)
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
    require_space_for_run(tmp_path, DiskSpace(free.bytes // 2, 1), 2)


def test_a_save_asks_first(tmp_path):
    huge = torch.zeros(1, dtype=torch.int64).expand(1 << 50)  # 8 PiB, of which one number is in memory
    with pytest.raises(SaveError, match=r"needs 8,192.0 TiB .* free"):
        save(tmp_path / "c", 1, {"model": {"w": huge}}, {}, 2, "run")
    assert not (tmp_path / "c").exists()
