"""A spike in the data of a real run: rolled back, and the same after a kill.

That a skipped one leaves no trace: faults/test_numerics.py; what the guard decides: tests/guard.
"""

import random

import pytest

from narrowgauge.trainer.checkpoint import load, steps
from narrowgauge.trainer.training.step.trainer import Trainer

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
def spiky(tmp_path_factory):
    """A run on text that is soon memorized, and in the middle of it some that cannot be predicted."""
    folder, rng = tmp_path_factory.mktemp("monotone"), random.Random(0)
    for i in range(24):
        # equal files would be on one side of the split
        (folder / f"{i:02}.txt").write_text("steam " * (50 + i))
    strange = "".join(rng.choice("QZXJ%&#@0123456789KVBWY") for _ in range(40))
    (folder / "11.txt").write_text("steam " * 30 + strange + " steam" * 20)
    return lambda **more: WINDOW | {"data.source": str(folder), "guard.spike": "rollback"} | more


@pytest.mark.tier("thorough")  # whole runs
def test_a_rollback_goes_on_with_other_data_and_without_a_checkpoint_is_a_skip(trained, train, spiky, look):
    skipped = look(train("none", spiky(**{"checkpoint.every": 1000})))
    assert not skipped.events("rollback")
    skip = skipped.events("skip")[0]
    assert "there is no checkpoint to return to" in skip["reason"]
    assert "first_bad" not in skip, "nothing in it is bad"
    run, spike = look(trained(spiky())), skip["step"]
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


class Killed(BaseException):
    """In place of kill -9: nothing in the run goes on after it."""


@pytest.mark.tier("thorough")  # whole runs
def test_killed_between_a_rollback_and_the_next_save(spiky, look, train, trained, monkeypatch, tmp_path):
    changes = spiky()
    expected, killed, take = look(trained(changes)), look(tmp_path / "killed"), Trainer.train_step

    def train_step(trainer, *arguments):
        if trainer.guard.rollbacks:
            raise Killed
        return take(trainer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        with pytest.raises(Killed):
            train("killed", changes)
    assert killed.events("rollback") == expected.events("rollback")[:1]
    assert steps(killed.path / "checkpoints")
    train("killed", changes)
    assert killed.trajectory == expected.trajectory
    assert killed.events("rollback") == expected.events("rollback")
