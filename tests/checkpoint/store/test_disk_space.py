"""Space on the disk is checked before anything is written."""

import os

import pytest
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import DiskSpace, SaveError, free_space, require_space_for_run, save
from narrowgauge.trainer.checkpoint.store.disk_space import require_space
from support.fault_table import case


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
