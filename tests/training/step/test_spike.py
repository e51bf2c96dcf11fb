"""A spike in the data of a real run: reported, skipped, or rolled back, and the same after any kill."""

import random
import secrets
import signal
import time

import pytest

from narrowgauge.checkpoint import load, steps

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
        (folder / f"{i:02}.txt").write_text(
            "steam " * (50 + i)
        )  # equal files would be on one side of the split
    strange = "".join(rng.choice("QZXJ%&#@0123456789KVBWY") for _ in range(40))
    (folder / "11.txt").write_text("steam " * 30 + strange + " steam" * 20)
    return str(folder)


@pytest.fixture
def spiky(monotone):
    def changes(spike, **more):
        return WINDOW | {"data.source": monotone, "guard.spike": spike} | more

    return changes


@pytest.mark.tier("thorough")  # a whole run; test_guard.py and this file show the step
def test_a_warning_changes_nothing(train, spiky, look):
    off, warned = look(train("off", spiky("off"))), look(train("warned", spiky("warn")))
    assert warned.trajectory[0] == off.trajectory[0]
    assert not off.events("spike")
    told = warned.events("spike")
    assert told
    for event in told:
        assert "the median of 12 steps" in event["reason"]
    assert warned.column("step") == list(range(1, 61))


@pytest.mark.tier("thorough")  # a whole run; test_guard.py and this file show the step
def test_a_skipped_spike_leaves_weights_and_moments(train, spiky, look):
    run = look(train("skip", spiky("skip", **{"checkpoint.every": 1, "checkpoint.keep": 60})))
    skipped = [event["step"] for event in run.events("skip")]
    assert skipped
    assert "first_bad" not in run.events("skip")[0], "nothing in it is bad"
    for step in skipped:
        before, after = (load(run.path / "checkpoints" / f"step-{s}") for s in (step - 1, step))
        for group in ("model", "optimizer"):
            for name, tensor in before.tensors[group].items():
                assert tensor.equal(after.tensors[group][name]), name
        assert after.state["guard"]["losses"] == before.state["guard"]["losses"]


@pytest.mark.tier("thorough")  # a whole run; test_guard.py and this file show the step
def test_a_rollback_goes_on_with_other_data(train, spiky, look):
    said_skip, run = look(train("skip", spiky("skip"))), look(train("back", spiky("rollback")))
    spike = said_skip.events("skip")[0]["step"]
    back = run.events("rollback")
    assert back[0]["from_step"] == spike, "the first decision is the same"
    assert back[0]["step"] == (spike - 1) // 4 * 4, "the newest checkpoint before it"
    assert back[0]["skipped_samples"] == [2 * back[0]["step"], 2 * spike - 1]
    assert [event["rollbacks"] for event in back] == list(range(1, len(back) + 1))
    assert run.column("tokens") == [2 * 32 * step for step in run.column("step")]
    assert run.column("step") == list(range(1, 61)), "each step once, in order"
    state = load(run.path / "checkpoints" / "step-60").state["guard"]
    skipped = sum(last - first + 1 for first, last in (event["skipped_samples"] for event in back))
    assert state["samples"] == 2 * 60 + skipped
    assert max(run.column("loss")[spike:]) < back[0]["figures"]["loss"]


@pytest.mark.tier("thorough")  # a whole run; test_guard.py and this file show the step
def test_a_rollback_without_a_checkpoint_is_a_skip(train, spiky, look):
    run = look(train("none", spiky("rollback", **{"checkpoint.every": 1000})))
    assert not run.events("rollback")
    assert "there is no checkpoint to go back to" in run.events("skip")[0]["reason"]


@pytest.mark.tier("thorough")  # five runs; the test below kills one at the moment that matters
def test_rollbacks_that_survive_kills_are_the_same(narrowgauge, line, spiky, look, tmp_path):
    seed = secrets.randbits(32)
    print(f"delays from random.Random({seed})")
    rng, words = random.Random(seed), line(spiky("rollback", **{"recipe.name": "fp8-delayed"}))
    began = time.monotonic()
    assert narrowgauge(*words, "--out", tmp_path / "whole").code == 0
    longest = time.monotonic() - began
    expected = look(tmp_path / "whole")
    assert expected.events("rollback")
    out = tmp_path / "killed"
    for _ in range(4):
        process = narrowgauge.start(*words, "--out", out)
        time.sleep(rng.uniform(0.3, 0.8) * longest)
        process.send(signal.SIGKILL)
        process.wait()
    assert narrowgauge(*words, "--out", out).code == 0
    assert look(out).trajectory == expected.trajectory
    assert look(out).events("rollback") == expected.events("rollback")


@pytest.mark.tier("thorough")  # a whole run; test_guard.py and this file show the step
def test_killed_between_a_rollback_and_the_next_save(narrowgauge, line, spiky, look, tmp_path):
    words, out = line(spiky("rollback", **{"checkpoint.every": 8})), tmp_path / "killed"
    assert narrowgauge(*words, "--out", tmp_path / "whole").code == 0
    expected = look(tmp_path / "whole")
    file = out / "metrics.jsonl"
    ended = narrowgauge.start(*words, "--out", out).send_when(
        lambda: file.exists() and '"rollback"' in file.read_text(), signal.SIGKILL
    )
    assert ended.code == -signal.SIGKILL
    assert steps(out / "checkpoints")
    assert narrowgauge(*words, "--out", out).code == 0
    assert look(out).trajectory == expected.trajectory
    assert look(out).events("rollback") == expected.events("rollback")
