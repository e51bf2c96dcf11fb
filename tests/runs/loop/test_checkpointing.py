"""Saves at once and in the background: the same files, honest lines, and what happens when they fail."""

import io
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from narrowgauge.checkpoint import SaveError, newest_valid, steps
from narrowgauge.training.step.trainer import Trainer
from support.processes import TORCHRUN

BEHIND = {"checkpoint.asynchronous": True}
WAYS = pytest.mark.parametrize("way", [{}, BEHIND], ids=["at once", "behind"])


@pytest.fixture
def in_step(monkeypatch):
    """Before the steps named `actions[n]()` is called, when no save is under way."""
    train_step, submit, pending = Trainer.train_step, ThreadPoolExecutor.submit, []

    def submit_and_remember(*arguments):
        found = submit(*arguments)
        if arguments[0]._thread_name_prefix == "checkpoint":
            pending.append(found)
        return found

    def do(actions):
        def act_and_step(trainer, *arguments):
            if action := actions.pop(trainer.step + 1, None):
                wait(pending)
                action()
            return train_step(trainer, *arguments)

        monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_and_remember)

        monkeypatch.setattr(Trainer, "train_step", act_and_step)

    return do


@pytest.fixture
def disk(tmp_path):
    """The place of the checkpoints of `train("run")`: `full()`, and `mended()` again."""

    class Disk:
        place, aside = tmp_path / "run" / "checkpoints", tmp_path / "aside"

        def full(self):
            self.place.rename(self.aside)
            self.place.touch()  # a file, in which nothing can be made

        def mended(self):
            self.place.unlink()
            self.aside.rename(self.place)

    return Disk()


@pytest.mark.tier("thorough")
def test_the_same_checkpoints_and_the_same_digits(train, look):
    behind, at_once = look(train("behind", BEHIND)), look(train("at once"))
    assert behind.trajectory == at_once.trajectory
    for run in (behind, at_once):
        assert [event["step"] for event in run.events("save")] == [2, 4, 6]
        assert steps(run.path / "checkpoints") == [4, 6]
        assert run.status["status"] == "done"


@pytest.mark.tier("thorough")
def test_a_slow_disk_does_not_hold_the_steps_and_a_second_save_waits(train, look, monkeypatch):
    """A step is recorded as saved when it is published, not when that began."""
    sync = os.fsync
    slow = threading.local()

    def sync_slowly(descriptor):
        if threading.current_thread() is not threading.main_thread():
            slow.ever = True
            time.sleep(0.1)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_slowly)
    begin = time.monotonic()
    path = train("run", BEHIND | {"validation.every": 100})
    taken = time.monotonic() - begin
    names = [(line.get("event"), line["step"]) for line in look(path).lines]
    saved = [names.index(("save", step)) for step in (2, 4, 6)]
    assert saved[0] > names.index((None, 4)), "two steps were made beside it"
    assert saved[1] > names.index((None, 6))
    assert saved[0] < saved[1] < saved[2], "one at a time"
    assert taken > 3 * 5 * 0.1, "each of them syncs its files and directories"
    assert sum(look(path).column("step_ms")[2:]) < 1000 * taken / 2


@pytest.mark.tier("thorough")  # checkpoint/store/ shows it without a run
@WAYS
def test_saves_that_fail_are_told_and_too_many_end_it(train, look, disk, in_step, way):
    in_step({5: disk.full})
    said = io.StringIO()
    with pytest.raises(SaveError, match="3 saves in a row have failed, and"):
        train("run", way | {"training.steps": 20}, said)
    disk.mended()
    run = look(disk.place.parent)
    assert [event["step"] for event in run.events("save failed")] == [6, 8, 10]
    assert said.getvalue().count("NOT SAVED: step") == 3
    assert run.steps[-1]["step"] == (12 if way else 10), "it is known at the next save"
    assert run.status["status"] == "failed"
    assert steps(disk.place) == [2, 4]
    train("run", way | {"training.steps": 20})
    expected = look(train("other", {"training.steps": 20}))
    assert run.trajectory == expected.trajectory


@pytest.mark.tier("thorough")
@WAYS
def test_failures_that_do_not_follow_each_other_end_nothing(train, look, disk, in_step, way):
    in_step({step: disk.full if step % 2 else disk.mended for step in (3, 6, 9, 12, 15, 18)})
    path = train("run", way | {"training.steps": 20})
    assert [event["step"] for event in look(path).events("save failed")] == [4, 10, 16]
    assert [event["step"] for event in look(path).events("save")] == [2, 6, 8, 12, 14, 18, 20]


@pytest.mark.tier("thorough")
@WAYS
def test_the_last_save_must_succeed(train, look, disk, in_step, way):
    in_step({6: disk.full})
    with pytest.raises(SaveError, match="step 6 could not be saved"):
        train("run", way | {"checkpoint.every": 4})
    assert [event["step"] for event in look(disk.place.parent).events("save failed")][-1] == 6


@pytest.mark.tier("thorough")  # checkpoint/store/ shows it without a run
@pytest.mark.parametrize("point", ["write:model.safetensors", "synced:optimizer.safetensors", "sealed"])
def test_killed_in_the_background(narrowgauge, line, look, tmp_path, train, point):
    """A save in progress is invisible, the previous one exists, and the run continues to the same digits."""
    out, changes = tmp_path / "run", BEHIND | {"training.steps": 40, "checkpoint.every": 8}
    words = [*line(changes), "--out", out]
    stopped = narrowgauge.start(*words).send_when(look(out).has_step(9), signal.SIGTERM)
    assert stopped.code == 75, stopped.err
    step = steps(out / "checkpoints")[-1]
    assert narrowgauge(*words, NARROWGAUGE_CRASH_AT=point).code == 137
    path, refused = newest_valid(out / "checkpoints", None)
    assert (path.name, refused) == (f"step-{step}", [])
    assert narrowgauge(*words).code == 0
    assert look(out).trajectory == look(train("undisturbed", changes)).trajectory


TWO = {"training.micro_batch_size": 1, "recipe.name": "msamp-o2", "model.dim": 64}


@pytest.mark.tier("thorough")  # checkpoint/store/ shows it without a run
def test_two_ranks_under_torchrun(narrowgauge, line, look, tmp_path):
    options = ["--standalone", "--nproc-per-node", "2", "-m", "narrowgauge"]
    runs = []
    for name, way in (("at once", {}), ("behind", BEHIND)):
        words = [*line(TWO | way), "--out", tmp_path / name]
        ended = narrowgauge(*options, *words, script=TORCHRUN)
        assert ended.code == 0, ended.err
        runs.append(look(tmp_path / name))
    at_once, behind = runs
    assert behind.trajectory == at_once.trajectory
    assert [event["step"] for event in behind.events("save")] == [2, 4, 6]
    assert (behind.path / "checkpoints" / "step-6" / "model-00002-of-00002.safetensors").exists()


@pytest.fixture
def two_ranks(narrowgauge):
    """`two_ranks(*words, **of_rank_1)`: how both ended, started as srun does."""

    def run(*words, **of_rank_1):
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        place = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        started = []
        for rank in (0, 1):
            environment = {name: str(v) for name, v in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()}
            started.append(narrowgauge.start(*words, **environment, **(of_rank_1 if rank else {})))
        return [one.wait() for one in started]

    return run


@pytest.mark.tier("thorough")  # checkpoint/store/ shows it without a run
@WAYS
def test_a_disk_that_is_full_on_one_rank_ends_both_alike(two_ranks, look, tmp_path, line, way):
    """Every save fails in rank 1, whose files may have only n bytes."""
    words = [*line(TWO | way | {"training.steps": 20}), "--out", tmp_path / "run"]
    ended = two_ranks(*words, largest_file=4000)
    assert [one.code for one in ended] == [1, 1], ended[0].err
    run = look(tmp_path / "run")
    assert [event["step"] for event in run.events("save failed")] == [2, 4, 6]
    for event in run.events("save failed"):
        assert "rank 1: [Errno 27] File too large" in event["reason"]
    assert "3 saves in a row have failed" in run.status["reason"]
    assert os.listdir(tmp_path / "run" / "checkpoints") == []
