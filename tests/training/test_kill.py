"""kill -9 at any moment, the same line again: every digit is that of the run nobody disturbed."""

import random
import secrets
import signal
import time

import pytest

from narrowgauge.checkpoint import steps

# 24 steps of two sequences cross the epoch, of some 35 sequences; a stop can fall between any two saves.
CHANGES = {"training.steps": 24, "checkpoint.every": 3, "validation.every": 5, "log.every": 1}


@pytest.fixture
def undisturbed(narrowgauge, line, look, tmp_path):
    """Train to the end in a process of its own: (the command line without --out, trajectory, seconds)."""

    def do(changes):
        words = line(CHANGES | changes)
        start = time.monotonic()
        ended = narrowgauge(*words, "--out", tmp_path / "undisturbed")
        assert ended.code == 0, ended.err
        return words, look(tmp_path / "undisturbed").trajectory, time.monotonic() - start

    return do


def kill_until_done(narrowgauge, words, out, rng, longest, most):
    """The same line again and again, killed after a random time at most `most` times; the number of kills."""
    kills = 0
    while kills < most:
        process = narrowgauge.start(*words, "--out", out)
        time.sleep(rng.uniform(0, longest))
        process.send(signal.SIGKILL)
        ended = process.wait()
        if ended.code == 0:
            return kills
        assert ended.code == -signal.SIGKILL, ended.err
        assert ended.err == ""
        kills += 1
    ended = narrowgauge(*words, "--out", out)
    assert ended.code == 0, ended.err
    return kills


def campaign(narrowgauge, undisturbed, look, tmp_path, changes, wanted):
    seed = secrets.randbits(32)
    print(f"delays from random.Random({seed})")
    rng = random.Random(seed)
    words, expected, seconds = undisturbed(changes)
    total = runs = 0
    while total < wanted:
        out = tmp_path / f"killed-{runs}"
        total += kill_until_done(narrowgauge, words, out, rng, seconds, wanted - total)
        assert look(out).trajectory == expected
        assert look(out).status["status"] == "done"
        assert len(look(out).events("done")) == 1
        runs += 1


def test_kills_leave_no_trace(narrowgauge, undisturbed, look, tmp_path):
    campaign(narrowgauge, undisturbed, look, tmp_path, {"recipe.name": "nvfp4"}, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "fp8-delayed", "mxfp4", "nvfp4", "quartet"])
def test_twenty_kills_leave_no_trace(narrowgauge, undisturbed, look, tmp_path, name):
    campaign(narrowgauge, undisturbed, look, tmp_path, {"recipe.name": name}, 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16-sr", "msamp-o1", "msamp-o2", "msamp-o3", "coat", "muon"])
def test_twenty_kills_leave_narrow_state_as_it_was(narrowgauge, undisturbed, look, tmp_path, name):
    """In a model whose matrices are large enough for narrow moments."""
    wide = {"model.dim": 128, "model.ffn_dim": 256}
    named = {"recipe.name": name} if name != "muon" else {"recipe.name": "msamp-o3", "optimizer.name": "muon"}
    campaign(narrowgauge, undisturbed, look, tmp_path, wide | named, 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"model.name": "gpt2-debug", "model.kv_heads": 2},
        {"training.recompute": True, "training.batch_size": 4, "training.micro_batch_size": 2},
        {"recipe.fprop.x": "{cast = 'mxfp4', rounding = 'stochastic'}"},
    ],
    ids=["tied head", "recompute", "stochastic forward"],
)
def test_kills_of_other_runs_leave_no_trace(narrowgauge, undisturbed, look, tmp_path, changes):
    if "recipe.fprop.x" in changes:
        recipe = tmp_path / "mine.toml"
        recipe.write_text(f"[fprop]\nx = {changes['recipe.fprop.x']}\n[dgrad]\ndy = 'nvfp4'\n")
        changes = {"recipe.name": recipe}
    campaign(narrowgauge, undisturbed, look, tmp_path, changes, 5)


@pytest.mark.parametrize("point", ["written:optimizer.safetensors", "publish", "published", "purging:step-3"])
def test_a_kill_inside_a_save_leaves_no_trace(narrowgauge, undisturbed, look, tmp_path, point):
    changes = {"training.steps": 9}
    words, expected, _ = undisturbed(changes)
    out = tmp_path / "killed"
    ended = narrowgauge(*words, "--out", out, NARROWGAUGE_CRASH_AT=point)
    assert ended.code == 137, ended.err
    assert narrowgauge(*words, "--out", out).code == 0
    assert look(out).trajectory == expected


@pytest.mark.parametrize(
    "point", ["write:recipe.toml", "renamed:recipe.toml", "renamed:config.toml", "renamed:status.json"]
)
def test_a_kill_while_starting_leaves_no_trace(narrowgauge, line, look, tmp_path, point):
    words = line({"training.steps": 2})
    assert narrowgauge(*words, "--out", tmp_path / "run", NARROWGAUGE_CRASH_AT=point).code == 137
    assert narrowgauge(*words, "--out", tmp_path / "run").code == 0
    assert look(tmp_path / "run").column("step") == [1, 2]


def test_resumed_and_killed_again_before_a_save(narrowgauge, undisturbed, look, tmp_path):
    words, expected, _ = undisturbed({})
    out = tmp_path / "killed"
    first = narrowgauge.start(*words, "--out", out)
    first.send_when(look(out).has_step(7), signal.SIGKILL)
    for resumes in (1, 2):  # each from the checkpoint of step 6, or of a later one where the process was fast
        newest = steps(out / "checkpoints")[-1]
        again = narrowgauge.start(*words, "--out", out)
        again.send_when(look(out).has_step(newest + 1, resumes), signal.SIGKILL)
    assert narrowgauge(*words, "--out", out).code == 0
    assert look(out).trajectory == expected


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "index.json", "state.json", "manifest.json"]
)
def test_a_damaged_checkpoint_is_passed_over(narrowgauge, undisturbed, look, tmp_path, name):
    words, expected, _ = undisturbed({"training.steps": 9})
    out = tmp_path / "undisturbed"
    (out / "status.json").unlink()
    flip_a_bit(out / "checkpoints" / "step-9" / name)
    ended = narrowgauge(*words, "--out", out)
    assert ended.code == 0, ended.err
    assert f"passed over: {out}/checkpoints/step-9/{name}" in ended.out
    assert "after step 6" in ended.out
    assert look(out).trajectory == expected


def test_when_all_checkpoints_are_damaged_nothing_is_trained(narrowgauge, undisturbed, look, tmp_path):
    words, _, _ = undisturbed({"training.steps": 9})
    out = tmp_path / "undisturbed"
    (out / "status.json").unlink()
    lines = look(out).lines
    for step in (6, 9):
        flip_a_bit(out / "checkpoints" / f"step-{step}" / "model.safetensors")
    ended = narrowgauge(*words, "--out", out)
    assert ended.code == 2
    (sentence,) = ended.err.splitlines()
    assert "step-6/model.safetensors" in sentence
    assert "step-9/model.safetensors" in sentence
    assert "delete that directory to start anew" in sentence
    assert look(out).lines == lines, "the record of what was done stays"


def test_a_checkpoint_of_another_run_is_passed_over(narrowgauge, undisturbed, look, tmp_path):
    words, expected, _ = undisturbed({"training.steps": 9})
    other = narrowgauge(*words, "--training.seed", "1", "--training.steps", "12", "--out", tmp_path / "other")
    assert other.code == 0, other.err
    out = tmp_path / "undisturbed"
    (out / "status.json").unlink()
    (tmp_path / "other" / "checkpoints" / "step-12").rename(out / "checkpoints" / "step-12")
    ended = narrowgauge(*words, "--out", out)
    assert ended.code == 0, ended.err
    assert "step-12/manifest.json is of run" in ended.out
    assert look(out).trajectory[0] == expected[0]
