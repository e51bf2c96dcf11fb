"""A spike in the data of a real run: reported, skipped, or rolled back, and the same after any kill."""

import random
import signal

import pytest

from narrowgauge.checkpoint import load, steps
from support.in_process import run_here

WINDOW = {
    "guard.spike_window": 12,
    "guard.max_rollbacks": 50,
    "guard.max_skips": 50,
    "checkpoint.every": 4,
    "training.steps": 60,
    "optimizer.lr": 0.01,
    "validation.every": 100,
}


@pytest.fixture(scope="session")
def monotone(tmp_path_factory):
    """Text that is soon memorized, and in the middle of it some that cannot be predicted."""
    folder, rng = tmp_path_factory.mktemp("monotone"), random.Random(0)
    for i in range(24):
        # equal files would be on one side of the split
        (folder / f"{i:02}.txt").write_text("steam " * (50 + i))
    strange = "".join(rng.choice("QZXJ%&#@0123456789KVBWY") for _ in range(40))
    (folder / "11.txt").write_text("steam " * 30 + strange + " steam" * 20)
    return str(folder)


@pytest.fixture
def spiky(monotone):
    def changes(spike, **more):
        return WINDOW | {"data.source": monotone, "guard.spike": spike} | more

    return changes


@pytest.fixture(scope="module")
def skipped(tiny, monotone, tmp_path_factory):
    """A run that skips its spikes, with a checkpoint after each step."""
    changes = WINDOW | {"data.source": monotone, "guard.spike": "skip"}
    changes |= {"checkpoint.every": 1, "checkpoint.keep": 60}
    return run_here(tiny(changes), tmp_path_factory.mktemp("skipped") / "run")


@pytest.mark.tier("thorough")  # whole runs
def test_a_warning_changes_nothing(train, spiky, look):
    off, warned = look(train("off", spiky("off"))), look(train("warned", spiky("warn")))
    assert warned.trajectory[0] == off.trajectory[0]
    assert not off.events("spike")
    assert warned.events("spike")
    assert all("the median of 12 steps" in event["reason"] for event in warned.events("spike"))
    assert warned.column("step") == list(range(1, 61))


@pytest.mark.tier("thorough")  # a whole run
def test_a_skipped_spike_leaves_weights_moments_and_the_window(skipped, look):
    run = look(skipped)
    at = [event["step"] for event in run.events("skip")]
    assert at
    assert "first_bad" not in run.events("skip")[0], "nothing in it is bad"
    for step in at:
        before, after = (load(run.path / "checkpoints" / f"step-{s}") for s in (step - 1, step))
        for group in ("model", "optimizer"):
            for name, tensor in before.tensors[group].items():
                assert tensor.equal(after.tensors[group][name]), name
        assert after.state["guard"]["losses"] == before.state["guard"]["losses"]


@pytest.mark.tier("thorough")  # whole runs
def test_a_rollback_goes_on_with_other_data_and_without_a_checkpoint_is_a_skip(skipped, train, spiky, look):
    run, spike = look(train("back", spiky("rollback"))), look(skipped).events("skip")[0]["step"]
    back = run.events("rollback")
    assert back[0]["from_step"] == spike, "the first decision is the same"
    assert back[0]["step"] == (spike - 1) // 4 * 4, "the newest checkpoint before it"
    assert back[0]["skipped_samples"] == [2 * back[0]["step"], 2 * spike - 1]
    assert [event["rollbacks"] for event in back] == list(range(1, len(back) + 1))
    assert run.column("tokens") == [2 * 32 * step for step in run.column("step")]
    assert run.column("step") == list(range(1, 61)), "each step once, in order"
    state = load(run.path / "checkpoints" / "step-60").state["guard"]
    passed = sum(last - first + 1 for first, last in (event["skipped_samples"] for event in back))
    assert state["samples"] == 2 * 60 + passed
    assert max(run.column("loss")[spike:]) < back[0]["figures"]["loss"]
    run = look(train("none", spiky("rollback", **{"checkpoint.every": 1000})))
    assert not run.events("rollback")
    assert "there is no checkpoint to go back to" in run.events("skip")[0]["reason"]


@pytest.mark.tier("thorough")  # kills at random moments: faults/test_numerics.py
def test_killed_between_a_rollback_and_the_next_save(narrowgauge, line, spiky, look, train, tmp_path):
    changes = spiky("rollback", **{"checkpoint.every": 8, "recipe.name": "fp8-delayed"})
    words, out = [*line(changes), "--out", tmp_path / "killed"], tmp_path / "killed"
    file, expected = out / "metrics.jsonl", look(train("whole", changes))
    ended = narrowgauge.start(*words).send_when(
        lambda: file.exists() and '"rollback"' in file.read_text(), signal.SIGKILL
    )
    assert ended.code == -signal.SIGKILL
    assert steps(out / "checkpoints")
    assert narrowgauge(*words).code == 0
    assert look(out).trajectory == expected.trajectory
    assert look(out).events("rollback") == expected.events("rollback")
