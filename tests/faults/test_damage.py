"""C. Damaged and hostile files: refused by name, never executed, and the run continues from what is sound."""

import os
import shutil

import pytest

from narrowgauge.checkpoint import newest_valid
from support.fault_runs import flip_a_bit, newest
from support.fault_table import RANKS, case

SHORT = {"training.steps": 12, "checkpoint.every": 3}


def continues_from_before(runs, out, ranks, named):
    """The newest step is passed over, its file named, and the run ends as the undisturbed one."""
    ended = runs.finish(runs.words(SHORT), out, ranks)
    assert f"passed over: {named}" in ended.out
    assert "after step 9" in ended.out
    assert runs.look(out).trajectory == runs.undisturbed(SHORT, ranks).trajectory


@pytest.mark.tier("thorough")  # checkpoint/store/ shows it without a run
@case("C1", tier="quick")
@RANKS
def test_one_flipped_bit_in_each_file_of_the_newest_checkpoint(runs, tmp_path, ranks):
    runs.copy(tmp_path / "run", SHORT, ranks)
    names = sorted(os.listdir(newest(tmp_path / "run")))
    assert {"manifest.json"} < set(names)
    for name in names:
        out = tmp_path / f"flipped-{name}"
        runs.copy(out, SHORT, ranks)
        flip_a_bit(newest(out) / name)
        continues_from_before(runs, out, ranks, f"{out}/checkpoints/step-12/{name}")


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def grown(file):
    with file.open("ab") as stream:
        stream.write(b"\0")


def of_another_step(file):
    (older,) = (p for p in file.parent.parent.glob("step-*") if p != file.parent)
    shutil.copy(older / file.name, file)


DAMAGE = {
    "cut": cut,
    "grown": grown,
    "empty": lambda file: os.truncate(file, 0),
    "missing": os.unlink,
    "of another step": of_another_step,
    "garbage": lambda file: file.write_bytes(os.urandom(500)),
}


@case("C2")
@RANKS
@pytest.mark.parametrize("damage", DAMAGE)
def test_each_file_damaged_in_each_way(runs, tmp_path, damage, ranks):
    runs.copy(tmp_path / "run", SHORT, ranks)
    for name in sorted(os.listdir(newest(tmp_path / "run"))):
        out = tmp_path / f"{damage}-{name}"
        runs.copy(out, SHORT, ranks)
        before = (newest(out) / name).read_bytes()
        DAMAGE[damage](newest(out) / name)
        if (newest(out) / name).exists() and (newest(out) / name).read_bytes() == before:
            continue  # a file that is the same in both steps
        continues_from_before(runs, out, ranks, f"{out}/checkpoints/step-12/{name}")


@case("C2")
@RANKS
def test_a_file_that_does_not_belong_there(runs, out, ranks):
    runs.copy(out, SHORT, ranks)
    (newest(out) / "more.safetensors").write_bytes(b"")
    continues_from_before(runs, out, ranks, f"{out}/checkpoints/step-12/more.safetensors")


@pytest.mark.tier("thorough")  # checkpoint/store/ shows it without a run
@case("C2", tier="quick")
@RANKS
def test_a_checkpoint_of_another_run_is_passed_over(runs, out, ranks):
    other = runs.undisturbed(SHORT | {"training.seed": 1, "training.steps": 15}, ranks).path
    runs.copy(out, SHORT, ranks)
    shutil.copytree(newest(other), out / "checkpoints" / "step-15")
    ended = runs.finish(runs.words(SHORT), out, ranks)
    assert "step-15/manifest.json is of run" in ended.out
    assert runs.look(out).trajectory[0] == runs.undisturbed(SHORT, ranks).trajectory[0]


@case("C3", tier="thorough")
@RANKS
def test_when_all_checkpoints_are_damaged_nothing_is_trained(runs, out, ranks):
    look = runs.copy(out, SHORT, ranks)
    lines = look.lines
    for step in (9, 12):
        name = max(os.listdir(out / "checkpoints" / f"step-{step}"))  # any file of it
        flip_a_bit(out / "checkpoints" / f"step-{step}" / name)
    ended = runs.start(runs.words(SHORT), out, ranks).wait(60)
    assert set(ended.codes) == {2}
    sentences = set(ended.err.splitlines())
    assert len(sentences) == 1, "one sentence, whichever rank says it"
    for words in ("step-9/", "step-12/", "delete that directory to start over"):
        assert words in ended.err
    assert look.lines == lines, "the record of what was done stays"


@case("C4")
@RANKS
@pytest.mark.parametrize("future", ["deleted", "damaged", "under another name"])
def test_going_back_and_killed_on_the_way_over_the_same_steps(runs, out, future, ranks):
    """The second way over steps 10 to 12 dies in its save again and again, next to what the first left."""
    look = runs.copy(out, SHORT, ranks)
    checkpoints = out / "checkpoints"
    (checkpoints / "step-12.tmp-0000dead").mkdir()
    if future == "deleted":
        shutil.rmtree(checkpoints / "step-12")
    elif future == "damaged":
        flip_a_bit(checkpoints / "step-12" / "manifest.json")
    else:
        (checkpoints / "step-12").rename(checkpoints / "step-21")
    for point in ("synced:state.json", "sealed", "publish"):
        ended = runs.start(runs.words(SHORT), out, ranks, NARROWGAUGE_CRASH_AT=point).wait()
        assert 137 in ended.codes, ended.err
        assert newest_valid(checkpoints)[0] == checkpoints / "step-9"
    runs.finish(runs.words(SHORT), out, ranks)
    assert look.trajectory == runs.undisturbed(SHORT, ranks).trajectory
    assert newest_valid(checkpoints) == (checkpoints / "step-12", [])
    assert not list(checkpoints.glob("*.tmp-*"))
