"""G1. Asked to stop, a run saves once, exits with code 75, and continues to the same digits."""

import random
import secrets
import signal
import time

import pytest

from narrowgauge.trainer.checkpoint import steps
from support.fault_jobs import alive
from support.fault_runs import continues
from support.fault_table import RANKS, case

# Only what a signal asks for is saved before the end.
RARE = {"training.steps": 30, "checkpoint.every": 100, "recipe.name": "nvfp4"}
ASKING = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]


@pytest.mark.tier("nightly", keep=("SIGTERM-1 rank",))
@case("G1", tier="thorough")
@RANKS
@pytest.mark.parametrize("number", ASKING, ids=lambda n: n.name)
def test_asked_to_stop_it_saves_once_and_the_same_line_continues(runs, out, number, ranks):
    look = runs.look(out)
    ended = runs.start(runs.words(RARE), out, ranks).until(look.has_step(4)).send(number).wait(25)
    assert set(ended.codes) == {75}, ended.err
    (step,) = steps(out / "checkpoints")
    assert 4 <= step < 30
    said = f"narrowgauge: stopped by {number.name} after step {step}; rerun the same command to resume\n"
    assert set(ended.err.splitlines(keepends=True)) == {said}
    assert look.status["status"] == "preempted"
    assert number.name in look.status["reason"]
    assert look.column("step") == list(range(1, step + 1))
    assert [event["step"] for event in look.events("save")] == [step], "one save"
    (stop,) = look.events("stop")
    assert (stop["step"], stop["reason"]) == (step, number.name)
    assert f"continuing {out} after step {step}" in continues(runs, out, RARE, ranks).out


@case("G1")
@RANKS
def test_signals_at_random_moments_leave_no_trace(runs, tmp_path, ranks):
    """From the first moment on: in the start, a step, a validation, a save; to all ranks or to one."""
    changes = {"checkpoint.every": 4, "validation.every": 3}
    seed = secrets.randbits(32)
    print(f"moments from random.Random({seed})")
    rng, longest, number = random.Random(seed), runs.seconds(changes, ranks), 0
    for _ in range(20):
        job = runs.start(runs.words(changes), tmp_path / f"run-{number}", ranks)
        time.sleep(rng.uniform(0, longest))
        asked = rng.choice(ASKING)
        if all(map(alive, job.pids.values())):
            job.send(asked, rank=rng.choice([None, *range(ranks)]))
        ended = job.wait(25)
        assert "Traceback" not in ended.err
        assert set(ended.codes) in ({75}, {0}), (asked, ended.err)
        number += set(ended.codes) == {0}
    for done in range(number + 1):
        continues(runs, tmp_path / f"run-{done}", changes, ranks)


@case("G1")
@RANKS
@pytest.mark.parametrize("pair", [(signal.SIGTERM, signal.SIGINT), (signal.SIGUSR1, signal.SIGTERM)], ids=str)
def test_a_second_signal_stops_at_once(runs, out, pair, ranks):
    job = runs.start(runs.words(RARE), out, ranks).until(runs.look(out).has_step(4))
    for number in (signal.SIGSTOP, *pair, signal.SIGCONT):  # both at one moment
        job.send(number)
    ended = job.wait(25)
    assert set(ended.codes) == {1}
    assert set(ended.err.splitlines()) == {"narrowgauge: interrupted"}
    assert steps(out / "checkpoints") == [], "no save"
    assert runs.look(out).status["status"] == "failed"
    continues(runs, out, RARE, ranks)


@case("G1", "D1")
@RANKS
def test_a_stop_that_cannot_save_does_not_say_it_did(runs, out, ranks):
    job = runs.start(runs.words(RARE), out, ranks, largest_file=50_000)
    ended = job.until(runs.look(out).has_step(4)).send(signal.SIGTERM).wait()
    assert not {0, 75} & set(ended.codes)
    assert "could not be saved" in ended.err
    assert runs.look(out).status["status"] == "failed"
