"""C. Damaged files and another configuration: refused by name, and the run goes on from what is sound.

`checkpoint/store` shows each kind of damage in each file, and hostile ones; `training/config` other texts.
"""

import json
import os
import shutil

import pytest

from narrowgauge.trainer.checkpoint import newest_valid
from support.fault_runs import contents, continues, flip_a_bit, newest
from support.fault_table import RANKS, case

SHORT = {"training.steps": 12, "checkpoint.every": 3}
STATE, MANIFEST = "state.json", "manifest.json"


#: What is done to the newest step, and the file of it that is named.
DAMAGE = {
    "flipped": (lambda step: flip_a_bit(step / MANIFEST), MANIFEST),
    "cut": (lambda step: os.truncate(step / STATE, 5), STATE),
    "missing": (lambda step: (step / STATE).unlink(), STATE),
    "of another step": (lambda step: shutil.copy(step.with_name("step-9") / STATE, step / STATE), STATE),
}


@case("C1", "C2")
@RANKS
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_step_is_passed_over_and_named(runs, out, damage, ranks):
    runs.copy(out, SHORT, ranks)
    change, name = DAMAGE[damage]
    change(newest(out))
    said = continues(runs, out, SHORT, ranks).out
    assert f"passed over: {out}/checkpoints/step-12/{name}" in said
    assert "after step 9" in said


@case("C4")
@RANKS
@pytest.mark.parametrize("future", ["deleted", "damaged", "under another name"])
def test_going_back_and_killed_on_the_way_over_the_same_steps(runs, out, future, ranks):
    """The second way over steps 10 to 12 dies in its save again and again, next to what the first left."""
    runs.copy(out, SHORT, ranks)
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
    continues(runs, out, SHORT, ranks)
    assert newest_valid(checkpoints) == (checkpoints / "step-12", [])


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
