"""Which step is the newest valid one, what a new step does to what is there, and what is kept."""

import os
import re
from pathlib import Path

import pytest
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import load, newest_valid, save, steps
from narrowgauge.trainer.checkpoint.store.manifest import read_manifest
from support.fault_table import case


def put(directory, step, value=None, keep=2, run_id="run"):
    value = step if value is None else value
    tensors = {"model": {"w": torch.full((30,), float(value))}}
    return save(directory, step, tensors, {"v": value}, keep, run_id)


def spoil(directory, step):
    with (directory / f"step-{step}" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    os.utime(directory / f"step-{step}" / "model.safetensors")


def test_only_a_name_of_a_step_counts(tmp_path):
    assert newest_valid(tmp_path / "missing", "run") == (None, [])
    assert steps(tmp_path / "missing") == []
    for name in ("step-5.tmp-abc", "step-05", "step-", "step--1", "step-1x", "latest"):
        (tmp_path / name).mkdir()
    assert newest_valid(tmp_path, "run") == (None, [])
    assert steps(tmp_path) == []
    for step in (9, 10, 0):
        (tmp_path / f"step-{step}").mkdir()
    assert steps(tmp_path) == [0, 9, 10], "numbers, not text"


def all_damaged(place):
    for step in (1, 2):
        put(place, step)
        spoil(place, step)


def set_aside(place):
    put(place, 1).rename(place / "step-1.aside-ab")


UNUSABLE = {
    all_damaged: r"step-2/model.*step-1/model.*does not start again from step 0 unasked; restore",
    set_aside: r"step-1.aside-ab was set aside.*unasked",
    Path.touch: "cannot be read as a directory of checkpoints: Not a directory",
}


@case("C3", tier="quick")
@pytest.mark.parametrize(("make", "words"), UNUSABLE.items())
def test_where_no_step_can_be_used_it_stops_with_advice(tmp_path, make, words):
    make(tmp_path / "c")
    with pytest.raises(UserError) as caught:
        newest_valid(tmp_path / "c", "run")
    assert re.search(words, str(caught.value), re.DOTALL), caught.value


def test_saving_the_same_again_changes_nothing(tmp_path):
    put(tmp_path, 1)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "step-1").iterdir()}
    assert put(tmp_path, 1) == tmp_path / "step-1"
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "step-1").iterdir()} == before
    assert os.listdir(tmp_path) == ["step-1"]


@case("C4", tier="quick")
def test_going_back_sets_the_abandoned_future_aside(tmp_path):
    for step in (10, 20, 30):
        put(tmp_path, step, keep=5)
    put(tmp_path, 20, value=21, keep=5)  # the run went back to 10 and took another way
    assert steps(tmp_path) == [10, 20]
    assert load(tmp_path / "step-20").state == {"v": 21}
    aside = sorted(name for name in os.listdir(tmp_path) if ".aside-" in name)
    assert [name.split(".")[0] for name in aside] == ["step-20", "step-30"]
    assert newest_valid(tmp_path, "run") == (tmp_path / "step-20", [])
    for step in (30, 40, 50):
        put(tmp_path, step, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-40", "step-50"]  # moved past: the old future is gone


@case("D5", tier="quick")
@pytest.mark.parametrize("keep", [2, 3])
def test_the_newest_valid_ones_remain(tmp_path, keep):
    for step in range(1, 9):
        put(tmp_path, step, keep=keep)
        assert steps(tmp_path) == list(range(max(1, step - keep + 1), step + 1))
    with pytest.raises(AssertionError):
        put(tmp_path, 9, keep=1)


@case("D5", tier="quick")
def test_a_damaged_step_or_one_of_another_run_does_not_count_as_kept(tmp_path):
    for step in (1, 2, 3):
        put(tmp_path, step, keep=3)
    spoil(tmp_path, 3)
    spoil(tmp_path, 2)
    put(tmp_path, 4, keep=2)
    assert steps(tmp_path) == [1, 2, 3, 4]  # 1 and 4 are the two valid ones
    put(tmp_path, 5, keep=2)
    assert steps(tmp_path) == [4, 5]
    put(tmp_path, 6, run_id="other", keep=5)
    put(tmp_path, 7)
    assert steps(tmp_path) == [5, 6, 7]
    assert read_manifest(tmp_path / "step-6").run_id == "other"


@case("G7", tier="quick")
def test_drafts_of_dead_saves_are_removed_and_nothing_else(tmp_path):
    for name in ("step-7.tmp-dead", "step-8.tmp-", "mine", "step-9.bak"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "step-6.tmp-link").symlink_to(tmp_path / "mine")
    put(tmp_path, 10)
    assert sorted(os.listdir(tmp_path)) == ["mine", "step-10", "step-9.bak"]
    assert (tmp_path / "mine" / "file").exists()
