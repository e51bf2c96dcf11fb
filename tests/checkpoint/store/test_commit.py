import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from narrowgauge import files
from narrowgauge.checkpoint import load, newest_valid, read_manifest, save, steps
from narrowgauge.checkpoint.store import commit
from narrowgauge.errors import UserError
from support.fault_table import case

FILES = ["model.safetensors", "optimizer.safetensors"]
POINTS = [
    "begun",
    *(f"{moment}:{file}" for file in FILES for moment in ("write", "written", "synced")),
    *(f"{moment}:{name}.json" for name in ("index", "state", "manifest") for moment in ("write", "synced")),
    "sealed",
    "publish",
    "published",
    "durable",
    "purge:step-1",
    "purging:step-1",
    "purged:step-1",
]


def put(directory, step, value=None, keep=2, run_id="run"):
    value = step if value is None else value
    return save(
        directory, step, {"model": {"w": torch.full((30,), float(value))}}, {"v": value}, keep, run_id
    )


def spoil(directory, step):
    with (directory / f"step-{step}" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    os.utime(directory / f"step-{step}" / "model.safetensors")


def assert_whole(directory, step):
    """The newest valid step is `step`, and all of its content was written by that step's save."""
    path, refused = newest_valid(directory, "run")
    assert (path, refused) == (directory / f"step-{step}", [])
    loaded = load(path)
    assert loaded.state == {"step": step}
    assert loaded.tensors["model"]["w"].eq(step).all()
    assert loaded.tensors["optimizer"]["m"].eq(step).all()


# Kill


def test_the_points_below_are_all_there_are():
    store = Path(commit.__file__).parent.glob("*.py")
    sources = "".join(file.read_text() for file in (*store, Path(files.__file__)))
    named = {re.sub(r"\{.*", "", name) for name in re.findall(r'crash_point\(f?"([^"]+)"\)', sources)}
    tested = {point.split(":")[0] + (":" if ":" in point else "") for point in POINTS}
    elsewhere = {"renamed:", "set-aside:"}  # tested in test_files.py and below
    elsewhere |= {"exchange:filled", "exchange:renamed"}  # and in tests/cli/test_models.py
    assert named == tested | elsewhere


@case("A3", tier="quick")
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_the_old_or_the_new_one_is_whole(tmp_path, in_process, point):
    for step in (1, 2):
        assert in_process("save", tmp_path, step=step).code == 0
    assert in_process("save", tmp_path, step=3, crash_at=point).code == 137
    visible = POINTS.index(point) >= POINTS.index("published")
    assert_whole(tmp_path, 3 if visible else 2)
    if point == "purging:step-1":
        assert steps(tmp_path) == [2, 3]  # it stops being a step before its files are deleted
    assert in_process("save", tmp_path, step=3).code == 0  # the run repeats the step
    assert_whole(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]


def test_killed_in_the_first_save_of_all_nothing_is_there(tmp_path, in_process):
    assert in_process("save", tmp_path / "c", step=1, crash_at="sealed").code == 137
    assert newest_valid(tmp_path / "c", "run") == (None, [])


@pytest.mark.tier("thorough")
def test_sigkill_at_random_moments(tmp_path, in_process):
    seed = random.randrange(2**32)
    print("seed", seed)
    delays = random.Random(seed)
    step = kills = 0
    while kills < 12 or step <= 3:  # on a busy machine few saves end before they are killed
        kills += 1
        assert kills < 200, "hardly a save ended"
        ended = in_process(
            "save for ever", tmp_path, step=step, elements=300_000, kill_after_s=delays.uniform(0.01, 0.12)
        )
        assert ended.code == -signal.SIGKILL
        path, refused = newest_valid(tmp_path, "run")
        assert refused == []
        if path is not None:
            newest = steps(tmp_path)[-1]
            assert newest >= step
            step = newest
            assert_whole(tmp_path, step)


def test_a_kill_while_a_damaged_step_is_replaced(tmp_path, in_process):
    for step in (1, 2):
        assert in_process("save", tmp_path, step=step).code == 0
    spoil(tmp_path, 2)
    for point in ("set-aside:step-2", "publish"):
        assert in_process("save", tmp_path, step=2, crash_at=point).code == 137
        assert newest_valid(tmp_path, "run")[0] == tmp_path / "step-1"
    assert in_process("save", tmp_path, step=2).code == 0
    assert_whole(tmp_path, 2)


@pytest.mark.tier("thorough")
@case("A8", tier="quick")
def test_files_are_synced_then_renamed_then_the_directory_is_synced(tmp_path):
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed: the order of the system calls cannot be watched")
    script = (
        "import sys, torch; from pathlib import Path; from narrowgauge.checkpoint import save;"
        "save(Path(sys.argv[1]), 1, {'model': {'w': torch.ones(9)}}, {}, keep=2, run_id='run')"
    )
    trace, directory = tmp_path / "trace", tmp_path / "checkpoints"
    command = [strace, "-f", "-y", "-o", trace, "-e", "trace=fsync,rename,renameat,renameat2,mkdir"]
    ended = subprocess.run(
        [*command, sys.executable, "-c", script, directory], capture_output=True, text=True
    )
    if ended.returncode != 0 and "ptrace" in ended.stderr.lower():
        pytest.skip("strace may not trace here")
    assert ended.returncode == 0, ended.stderr
    # A call in which another thread was scheduled stands there as "unfinished".
    lines = trace.read_text().replace(" <unfinished ...>", ") = 0").splitlines()
    calls = [line for line in lines if str(tmp_path) in line and "= 0" in line]
    at = {}
    for number, call in enumerate(calls):
        what = re.sub(r"tmp-[0-9a-f]+", "tmp", call.replace(str(tmp_path), "T").split(None, 1)[1])
        what = re.sub(r"<T", "T", re.sub(r"\(\d+<", "(<", what)).replace(">)", ")").split("  ")[0]
        at.setdefault(what.split(" = ")[0].strip(), number)
    staging = "T/checkpoints/step-1.tmp"
    for file in ("model.safetensors", "state.json", "manifest.json"):
        assert at[f"fsync({staging}/{file})"] < at[f"fsync({staging})"]
    assert at[f"fsync({staging}/model.safetensors)"] < at[f"fsync({staging}/manifest.json)"]
    (rename,) = [
        number for what, number in at.items() if what.startswith("rename") and f'"{staging}"' in what
    ]
    assert at["fsync(T)"] < at[f"fsync({staging})"] < rename < at["fsync(T/checkpoints)"]


# Choice


def test_nothing_published_is_nothing_refused(tmp_path):
    assert newest_valid(tmp_path / "missing", "run") == (None, [])
    assert steps(tmp_path / "missing") == []
    for name in ("step-5.tmp-abc", "step-05", "step-", "step--1", "step-1x", "latest"):
        (tmp_path / name).mkdir()
    assert newest_valid(tmp_path, "run") == (None, [])
    assert steps(tmp_path) == []


def test_steps_are_numbers_not_text(tmp_path):
    for step in (9, 10, 0):
        (tmp_path / f"step-{step}").mkdir()
    assert steps(tmp_path) == [0, 9, 10]


def test_all_bad_stops_with_advice_and_names_each(tmp_path):
    for step in (1, 2):
        put(tmp_path, step)
        spoil(tmp_path, step)
    with pytest.raises(UserError) as caught:
        newest_valid(tmp_path, "run")
    said = str(caught.value)
    assert said.index("step-2/model.safetensors") < said.index("step-1/model.safetensors")
    assert "does not start again from step 0 unasked; restore a step from a copy, or delete" in said


def test_a_file_in_place_of_the_directory_is_one_sentence(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UserError, match="cannot be read as a directory of checkpoints: Not a directory"):
        newest_valid(tmp_path / "checkpoints")


# Publishing where something is


def test_saving_the_same_again_changes_nothing(tmp_path):
    put(tmp_path, 1)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "step-1").iterdir()}
    assert put(tmp_path, 1) == tmp_path / "step-1"
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "step-1").iterdir()} == before
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_damaged_step_of_the_same_number_is_set_aside(tmp_path):
    put(tmp_path, 1)
    put(tmp_path, 2)
    spoil(tmp_path, 2)
    put(tmp_path, 2)
    assert load(tmp_path / "step-2").state == {"v": 2}
    assert [name.split("-")[1] for name in os.listdir(tmp_path) if "aside" in name] == ["2.aside"]


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


def test_only_set_aside_ones_left_is_no_start_from_zero(tmp_path):
    (put(tmp_path, 1)).rename(tmp_path / "step-1.aside-ab")
    with pytest.raises(UserError, match=r"step-1.aside-ab was set aside.*step 0 unasked"):
        newest_valid(tmp_path, "run")


# Retention


@case("D5", tier="quick")
@pytest.mark.parametrize("keep", [2, 3])
def test_the_newest_valid_ones_remain(tmp_path, keep):
    for step in range(1, 9):
        put(tmp_path, step, keep=keep)
        assert steps(tmp_path) == list(range(max(1, step - keep + 1), step + 1))


@case("D5", tier="quick")
def test_a_damaged_step_does_not_count_as_kept(tmp_path):
    for step in (1, 2, 3):
        put(tmp_path, step, keep=3)
    spoil(tmp_path, 3)
    spoil(tmp_path, 2)
    put(tmp_path, 4, keep=2)
    assert steps(tmp_path) == [1, 2, 3, 4]  # 1 and 4 are the two valid ones
    put(tmp_path, 5, keep=2)
    assert steps(tmp_path) == [4, 5]


def test_a_step_of_another_run_does_not_count_as_kept(tmp_path):
    put(tmp_path, 1)
    put(tmp_path, 2, run_id="other")
    put(tmp_path, 3)
    assert steps(tmp_path) == [1, 2, 3]
    assert read_manifest(tmp_path / "step-2").run_id == "other"


def test_drafts_of_dead_saves_are_removed_and_nothing_else(tmp_path):
    for name in ("step-7.tmp-dead", "step-8.tmp-", "mine", "step-9.bak"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "step-6.tmp-link").symlink_to(tmp_path / "mine")
    put(tmp_path, 10)
    assert sorted(os.listdir(tmp_path)) == ["mine", "step-10", "step-9.bak"]
    assert (tmp_path / "mine" / "file").exists()


def test_fewer_than_two_is_refused(tmp_path):
    with pytest.raises(AssertionError):
        put(tmp_path, 1, keep=1)
