"""Processes side by side: no more than slots, each job once; a failure leaves the others alone."""

import fcntl
import os
import signal
import sys
import threading
import time

import pytest

from narrowgauge.trainer.experiment.jobs import ComparisonFailed, Engine, Job, environment_of
from narrowgauge.trainer.runs.run_directory import RunDirectory

NOTE = "import sys, time; open(sys.argv[1], 'a').write(sys.argv[2] + ' '); time.sleep(float(sys.argv[3]))"


def queue(*jobs):
    """Gives the jobs in their order."""
    return lambda begun: next((one for one in jobs if one.key not in begun), None)


def job(tmp_path, name, seconds=0.0, code=0, tokens=1):
    words = ("-S", "-c", f"{NOTE}; sys.exit({code})", tmp_path / "notes", name, seconds)
    return Job(name, (sys.executable, *map(str, words)), tmp_path / name, tokens)


def engine(places, seen=None):
    def show(jobs, ended):
        assert len(jobs) <= places
        if seen is not None and ended is not None:
            seen.append(ended.name)

    return Engine(places, environment_of(1, "fp32"), show)


def test_jobs_share_the_slots_and_begin_once(tmp_path):
    seen = []
    engine(2, seen).run(queue(*(job(tmp_path, f"{name}") for name in "abcde")))
    assert sorted((tmp_path / "notes").read_text().split()) == sorted(seen) == [*"abcde"]


def test_a_run_that_another_engine_holds_is_left_to_it_and_taken_over_when_it_is_free(tmp_path):
    """Its log is locked; the lock goes with the last process that has the file open, as when it is killed."""
    taken, free = (job(tmp_path, name) for name in ("taken", "free"))
    theirs = (tmp_path / "taken.log").open("ab")
    fcntl.flock(theirs, fcntl.LOCK_EX)

    def show(jobs, ended):
        if ended is not None and ended.name == "free":
            threading.Timer(0.5, theirs.close).start()

    Engine(1, {}, show).run(queue(taken, free))
    assert (tmp_path / "notes").read_text().split() == ["free", "taken"]


def test_engine_stopped_by_a_signal_is_not_done_while_work_is_left(tmp_path):
    """A run in its last step, or an evaluation, ends with 0 when it is asked to stop."""
    first, second = job(tmp_path, "first"), job(tmp_path, "second")
    asked = Engine(1, {}, lambda jobs, ended: signal.raise_signal(signal.SIGTERM) if ended else None)
    with pytest.raises(ComparisonFailed, match="'second' ended with exit code 75"):
        asked.run(queue(first, second))
    assert (tmp_path / "notes").read_text().split() == ["first"]
    last = Engine(1, {}, lambda jobs, ended: signal.raise_signal(signal.SIGTERM) if ended else None)
    last.run(queue(first))  # nothing is left


def test_a_run_that_fails_by_itself_leaves_the_others(tmp_path):
    (tmp_path / "full").mkdir()
    RunDirectory(tmp_path / "full").set_status("failed", "SaveError: no room")
    jobs = [job(tmp_path, "full", code=1), job(tmp_path, "other")]
    assert engine(1).run(queue(*jobs)) == ["full"]
    assert (tmp_path / "notes").read_text().split() == ["full", "other"]


def test_a_run_that_cannot_begin_stops_the_experiment(tmp_path):
    jobs = [job(tmp_path, "refused", code=2), job(tmp_path, "never")]
    with pytest.raises(ComparisonFailed, match="'refused' ended with exit code 2") as failure:
        engine(1).run(queue(*jobs))
    assert failure.value.code == 2
    assert (tmp_path / "notes").read_text().split() == ["refused"]


def test_each_place_has_one_of_the_gpus_that_this_process_may_use(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    note = "import os, sys; open(sys.argv[1], 'a').write(os.environ['CUDA_VISIBLE_DEVICES'] + ' ')"
    command = (sys.executable, "-S", "-c", note, str(tmp_path / "notes"))
    for places, gpus in ((2, ["4", "6"]), (1, ["4,6"] * 2)):
        (tmp_path / "notes").unlink(missing_ok=True)
        engine(places).run(queue(*(Job(name, command, tmp_path / name, 1) for name in "ab")))
        assert sorted((tmp_path / "notes").read_text().split()) == gpus


def test_a_signal_reaches_every_run_and_nothing_new_begins(tmp_path):
    jobs = [job(tmp_path, name, seconds=600) for name in "abc"]

    def stop():
        while not (tmp_path / "notes").exists() or len((tmp_path / "notes").read_text().split()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    with pytest.raises(ComparisonFailed, match="exit code 75"):
        engine(2).run(queue(*jobs))
    assert sorted((tmp_path / "notes").read_text().split()) == ["a", "b"]
