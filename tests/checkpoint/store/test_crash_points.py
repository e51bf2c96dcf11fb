"""A process that dies at any point of a save, or of a text written whole, leaves the old or the new."""

import os
import re

import pytest
import torch

from narrowgauge.system.files import write_whole
from narrowgauge.trainer.checkpoint import newest_valid, save, steps
from support.checkpoint_ranks import assert_whole
from support.fault_runs import flip_a_bit
from support.fault_table import case

FIRST, SECOND = (
    [f"{group}-0000{n}-of-00002.safetensors" for group in ("model", "optimizer")] for n in (1, 2)
)


def written(names):
    return [f"{moment}:{name}" for name in names for moment in ("write", "written", "synced")]


def points(names):
    """The points at which a process that publishes these tensor files may die, in order."""
    texts = [
        f"{moment}:{name}.json" for name in ("index", "state", "manifest") for moment in ("write", "synced")
    ]
    ends = ["sealed", "publish", "published", "durable", "purge:step-1", "purging:step-1", "purged:step-1"]
    return ["begun", *written(names), *texts, *ends]


ALONE, ON_FIRST = points(["model.safetensors", "optimizer.safetensors"]), points(FIRST)
#: Of two processes every point of the first, and of the second its files; `@` is one rank.
OF_TWO = [*ON_FIRST, *written(SECOND), "synced:state.json@0", f"written:{SECOND[0]}@1"]
QUICK = {"begun", "published", f"write:{SECOND[0]}", f"written:{SECOND[0]}@1"}
LATER = pytest.mark.tier("thorough")  # one process shows the same points
DEATHS = [(1, point) for point in ALONE]
DEATHS += [pytest.param(2, point, marks=() if point in QUICK else LATER) for point in OF_TWO]


@case("A3", "D5", tier="quick")
@pytest.mark.parametrize(("ranks", "point"), DEATHS)
def test_killed_at_any_point_of_any_rank_the_old_or_the_new_step_is_whole(tmp_path, on_ranks, ranks, point):
    assert on_ranks(ranks, "save", tmp_path, steps=[1, 2]).one == ["step-1", "step-2"]
    codes = on_ranks(ranks, "save", tmp_path, crash_at=point, steps=[3]).codes
    victim = 1 if any(name in point for name in SECOND) else 0
    assert codes.pop(victim) == 137
    assert codes == [1] * (ranks - 1), "the other rank ends too, and not by itself as if all were well"
    order = ALONE if ranks == 1 else ON_FIRST
    newest = 3 if point in order and order.index(point) >= order.index("published") else 2
    assert newest_valid(tmp_path, "run") == (tmp_path / f"step-{newest}", [])
    assert_whole(tmp_path / f"step-{newest}", newest)
    # Never fewer than two; the oldest stops being a step before its files are deleted.
    kept = [1, 2, 3][point in order and order.index(point) >= order.index("purging:step-1") :]
    assert steps(tmp_path) == (kept if newest == 3 else [1, 2])
    assert on_ranks(ranks, "save", tmp_path, steps=[3]).one == ["step-3"]  # the run repeats the step
    assert_whole(tmp_path / "step-3", 3)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]


def test_killed_in_the_first_save_of_all_nothing_is_there(tmp_path, on_ranks):
    assert on_ranks(1, "save", tmp_path, steps=[1], crash_at="sealed").codes == [137]
    assert newest_valid(tmp_path, "run") == (None, [])


def test_killed_while_a_damaged_step_is_replaced(tmp_path, on_ranks):
    on_ranks(1, "save", tmp_path, steps=[1, 2])
    flip_a_bit(tmp_path / "step-2" / "model.safetensors")
    for point in ("set-aside:step-2", "publish"):
        assert on_ranks(1, "save", tmp_path, steps=[2], crash_at=point).codes == [137]
        assert newest_valid(tmp_path, "run")[0] == tmp_path / "step-1"
    on_ranks(1, "save", tmp_path, steps=[2])
    assert_whole(newest_valid(tmp_path, "run")[0], 2)


@pytest.mark.parametrize(
    ("point", "expected"),
    [("write:f", "old"), ("synced:f", "old"), ("renamed:f", "new"), ("no such point", "new")],
)
def test_killed_in_a_text_that_is_written_whole_it_is_the_old_or_the_new(tmp_path, on_ranks, point, expected):
    write_whole(tmp_path / "f", "old")
    ended = on_ranks(1, "write_text", tmp_path / "f", crash_at=point)
    assert ended.codes == [0 if point == "no such point" else 137]
    assert (tmp_path / "f").read_text() == expected


@case("A8", tier="quick")
def test_files_are_synced_then_renamed_then_the_directory_is_synced(tmp_path, monkeypatch):
    """Covers one save; runs/loop/test_disk.py covers a whole run."""
    calls, sync, rename = [], os.fsync, os.rename

    def fsync(descriptor):
        sync(descriptor)
        calls.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def renamed(old, new):
        rename(old, new)
        calls.append(f"{old} -> {new}")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    save(tmp_path / "c", 1, {"model": {"w": torch.ones(9)}}, {}, keep=2, run_id="run")
    calls = [re.sub(r"tmp-[0-9a-f]+", "tmp", call.replace(str(tmp_path), "T")) for call in calls]
    draft = "T/c/step-1.tmp"
    files = {f"{draft}/{name}" for name in ("index.json", "state.json", "model.safetensors")}
    end = [f"{draft}/manifest.json", draft, f"{draft} -> T/c/step-1", "T/c"]
    assert calls[0] == "T", "the new directory has a name before anything is in it"
    assert set(calls[1:-4]) == files
    assert calls[-4:] == end
