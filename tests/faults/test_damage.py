"""C. Files that are damaged, hostile or of another run: refused by name, never executed, and the run goes on
from what is sound.

`checkpoint/store` shows each kind of damage in each file without a run.
"""

import json
import os
import pickle
import shutil

import pytest

from narrowgauge.trainer.checkpoint import newest_valid, read_manifest
from support.fault_runs import contents, flip_a_bit, newest
from support.fault_table import RANKS, case
from support.hostile import MALFORMED, Bomb, forge

SHORT = {"training.steps": 12, "checkpoint.every": 3}
STATE, MANIFEST = "state.json", "manifest.json"


def of_another_run(runs, step):
    other = runs.undisturbed(SHORT | {"training.seed": 1}).path
    shutil.rmtree(step)
    shutil.copytree(newest(other), step)


#: What is done to the newest step, and the file of it that is named.
DAMAGE = {
    "flipped": (lambda runs, step: flip_a_bit(step / MANIFEST), MANIFEST),
    "cut": (lambda runs, step: os.truncate(step / STATE, 5), STATE),
    "missing": (lambda runs, step: (step / STATE).unlink(), STATE),
    "garbage": (lambda runs, step: (step / MANIFEST).write_bytes(os.urandom(500)), MANIFEST),
    "more": (lambda runs, step: (step / "more.safetensors").touch(), "more.safetensors"),
    "of another step": (
        lambda runs, step: shutil.copy(step.with_name("step-9") / STATE, step / STATE),
        STATE,
    ),
    "of another run": (of_another_run, MANIFEST),
}


@case("C1", "C2")
@RANKS
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_step_is_passed_over_and_named(runs, out, damage, ranks):
    runs.copy(out, SHORT, ranks)
    change, name = DAMAGE[damage]
    change(runs, newest(out))
    ended = runs.finish(runs.words(SHORT), out, ranks)
    assert f"passed over: {out}/checkpoints/step-12/{name}" in ended.out
    assert "after step 9" in ended.out
    assert runs.look(out).trajectory == runs.undisturbed(SHORT, ranks).trajectory


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
        flip_a_bit(checkpoints / "step-12" / MANIFEST)
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


@pytest.fixture
def bomb(tmp_path):
    """The bytes of a live pickle, which must not go off."""
    data = pickle.dumps(Bomb(tmp_path / "exploded"))
    pickle.loads(data)
    (tmp_path / "exploded").rmdir()
    yield data
    assert not (tmp_path / "exploded").exists(), "something was executed"


@case("C5", "C6")
@pytest.mark.parametrize("kind", ["pickle", *list(MALFORMED)[:5]])
def test_a_sealed_step_with_a_hostile_file_is_refused_in_little_memory(runs, tmp_path, bomb, kind):
    names = [*sorted(read_manifest(newest(runs.undisturbed(SHORT).path)).files), "model.pt", ".metadata"]
    for name in names if kind == "pickle" else ["model.safetensors"]:
        out = tmp_path / name
        runs.copy(out, SHORT)
        data = bomb if kind == "pickle" else MALFORMED[kind]
        forge(newest(out), {name: data}, read_manifest(newest(out)).run_id)
        ended = runs.start(runs.words(SHORT), out, memory=12 << 30).wait(60)
        assert set(ended.codes) <= {0, 2}, ended.err
        assert name in ended.out + ended.err
        assert "Traceback" not in ended.err


#: Another value in the same line, and the name that the refusal says.
OTHER = {
    "optimizer.lr": ("0.01", "optimizer.lr"),
    "recipe.name": ("mxfp8", "recipe.name"),
    "recipe.fprop.x": ("bf16", "recipe"),
    "training.seed": ("7", "training.seed"),
    "data.tokenizer": ("bpe-270", "data.tokenizer"),
    "model.ffn_dim": ("96", "model.ffn_dim"),
}


def but_the_lock(directory):
    return {name: data for name, data in contents(directory) if name != ".lock"}


@case("C7", tier="thorough")
@RANKS
def test_another_configuration_is_refused_by_name_or_allowed_by_name(runs, out, ranks):
    look = runs.copy(out, SHORT, ranks)
    before = but_the_lock(out)
    for key, (value, named) in OTHER.items():
        more = ["--model.vocab_size", "300"] if key == "data.tokenizer" else []
        ended = runs.start([*runs.words(SHORT), f"--{key}", value, *more], out, ranks).wait()
        assert set(ended.codes) == {2}, ended.err
        assert named in ended.err or (more and "model.vocab_size" in ended.err)
        assert but_the_lock(out) == before
    words = [*runs.words(SHORT), "--optimizer.lr", "0.01", "--training.steps", "18"]
    one = runs.start([*words, "--allow-change", "optimizer.lr"], out, ranks).wait()
    assert set(one.codes) == {2}, "the other change was not allowed"
    assert "training.steps" in one.err
    runs.finish([*words, "--allow-change", "optimizer.lr,training.steps"], out, ranks)
    assert look.column("step") == list(range(1, 19))
    assert look.column("loss")[:12] == runs.undisturbed(SHORT, ranks).column("loss")
    assert "optimizer.lr" in json.dumps(look.lines)


@case("C7")
@pytest.mark.parametrize("what", ["data", "recipe"])
def test_another_text_under_the_same_name_is_refused(runs, out, text, tmp_path, what):
    source, recipe = tmp_path / "text", tmp_path / "mine.toml"
    shutil.copytree(text, source)
    recipe.write_text("[fprop]\nx = 'mxfp8'\n")
    words = runs.words(SHORT | {"data.source": source, "recipe.name": recipe})
    runs.finish(words, out)
    (out / "status.json").unlink()
    if what == "data":
        (source / "00.txt").write_text("something else\n" * 10)
    else:
        recipe.write_text("[fprop]\nx = 'mxfp4'\n")
    ended = runs.start(words, out).wait()
    assert ended.codes == [2]
    assert ("restore text and tokenizer" if what == "data" else "another text of recipe") in ended.err
