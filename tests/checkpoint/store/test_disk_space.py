"""Room on the disk is asked for before anything is written."""

import os

import pytest
import torch

from narrowgauge.checkpoint import SaveError, require_space, save


def test_what_fits_is_not_refused(tmp_path):
    require_space(tmp_path / "not" / "there" / "yet", 1 << 20, 10)


def test_too_few_bytes_are_refused_with_needed_and_free(tmp_path):
    with pytest.raises(SaveError) as caught:
        require_space(tmp_path, 1 << 62, 1)
    disk = os.statvfs(tmp_path)
    assert f"needs 4294967296.00 GiB ({1 << 62} bytes) for a checkpoint" in str(caught.value)
    free = int(str(caught.value).split(" bytes) free")[0].rsplit("(", 1)[1])
    assert abs(free - disk.f_bavail * disk.f_frsize) < 1 << 30


def test_too_few_inodes_are_refused_with_needed_and_free(tmp_path):
    if not os.statvfs(tmp_path).f_files:
        pytest.skip("this file system makes inodes as it needs them")
    with pytest.raises(
        SaveError, match=rf"needs {1 << 50} inodes for a checkpoint, and its disk has \d+ free"
    ):
        require_space(tmp_path, 0, 1 << 50)


def test_a_save_asks_first(tmp_path):
    huge = torch.zeros(1, dtype=torch.int64).expand(1 << 50)  # 8 PiB, of which one number is in memory
    with pytest.raises(SaveError, match=r"needs 8388608.00 GiB .* free"):
        save(tmp_path / "c", 1, {"model": {"w": huge}}, {}, 2, "run")
    assert not (tmp_path / "c").exists()
