"""G1. Asked to stop, a run saves once, exits with code 75, and continues to the same digits."""

import random
import secrets
import signal
import time

import pytest

from narrowgauge.checkpoint import steps
from support.fault_jobs import alive
from support.fault_table import RANKS, case

# Only what a signal asks for is saved before the end.
RARE = {"training.steps": 30, "checkpoint.every": 100, "recipe.name": "nvfp4"}
ASKING = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]


def stops_and_goes_on(runs, out, ranks, number):
    words, look = runs.words(RARE), runs.look(out)
    job, start = runs.start(words, out, ranks).until(look.has_step(4)), time.monotonic()
    ended = job.send(number).wait(25)
    assert time.monotonic() - start < 25
    assert set(ended.codes) == {75}, ended.err
    (step,) = steps(out / "checkpoints")
    assert 4 <= step < 30
    said = f"narrowgauge: stopped by {number.name} after step {step}; the same line continues\n"
    assert set(ended.err.splitlines(keepends=True)) == {said}
    assert look.status["status"] == "preempted"
    assert number.name in look.status["reason"]
    assert look.column("step") == list(range(1, step + 1))
    assert [event["step"] for event in look.events("save")] == [step], "one save"
    (stop,) = look.events("stop")
    assert (stop["step"], stop["reason"]) == (step, number.name)
    ended = runs.finish(words, out, ranks)
    assert f"continuing {out} after step {step}" in ended.out
    assert look.trajectory == runs.undisturbed(RARE, ranks).trajectory
    assert look.status["status"] == "done"


@pytest.mark.tier("thorough")
@case("G1", tier="quick")
@RANKS
def test_asked_to_stop_it_saves_once_and_the_same_line_goes_on(runs, out, ranks):
    stops_and_goes_on(runs, out, ranks, signal.SIGTERM)


@case("G1")
@RANKS
@pytest.mark.parametrize("number", ASKING[1:], ids=lambda n: n.name)
def test_the_other_signals_ask_the_same(runs, out, number, ranks):
    stops_and_goes_on(runs, out, ranks, number)


@case("G1")
@RANKS
def test_signals_at_random_moments_leave_no_trace(runs, tmp_path, ranks):
    """From the first moment on: in the start, a step, a validation, a save; to all ranks or to one."""
    changes = {"checkpoint.every": 4, "validation.every": 3}
    seed = secrets.randbits(32)
    print(f"moments from random.Random({seed})")
    rng, words = random.Random(seed), runs.words(changes)
    longest, number = runs.seconds(changes, ranks), 0
    for _ in range(20):
        out = tmp_path / f"run-{number}"
        job = runs.start(words, out, ranks)
        time.sleep(rng.uniform(0, longest))
        asked, start = rng.choice(ASKING), time.monotonic()
        if all(map(alive, job.pids.values())):
            job.send(asked, rank=rng.choice([None, *range(ranks)]))
        ended = job.wait(25)
        assert time.monotonic() - start < 25
        assert "Traceback" not in ended.err
        assert set(ended.codes) in ({75}, {0}), (asked, ended.err)
        if set(ended.codes) == {0}:
            assert runs.look(out).trajectory == runs.undisturbed(changes, ranks).trajectory
            number += 1
    runs.finish(words, tmp_path / f"run-{number}", ranks)
    last = runs.look(tmp_path / f"run-{number}")
    assert last.trajectory == runs.undisturbed(changes, ranks).trajectory


@case("G1")
@RANKS
def test_a_signal_in_the_middle_of_a_save(runs, out, ranks):
    words, look = runs.words(), runs.look(out)
    job = runs.start(words, out, ranks, [{"kind": "slow_disk", "seconds": 0.1}])
    job.until(lambda: list((out / "checkpoints").glob("step-*.tmp-*")))
    ended = job.send(signal.SIGTERM).wait(25)
    assert set(ended.codes) == {75}, ended.err
    runs.finish(words, out, ranks)
    assert look.trajectory == runs.undisturbed(None, ranks).trajectory


@case("G1")
@RANKS
def test_a_signal_while_starting_stops_it_too(runs, out, ranks):
    job = runs.start(runs.words(RARE), out, ranks).until((out / "tokenizer.json").exists)
    assert set(job.send(signal.SIGUSR1).wait(25).codes) == {75}
    assert runs.look(out).status["status"] == "preempted"
    runs.finish(runs.words(RARE), out, ranks)
    assert runs.look(out).trajectory == runs.undisturbed(RARE, ranks).trajectory


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
    runs.finish(runs.words(RARE), out, ranks)
    assert runs.look(out).trajectory == runs.undisturbed(RARE, ranks).trajectory


@case("G1", "D1")
@RANKS
def test_a_stop_that_cannot_save_does_not_say_it_did(runs, out, ranks):
    job = runs.start(runs.words(RARE), out, ranks, largest_file=50_000)
    ended = job.until(runs.look(out).has_step(4)).send(signal.SIGTERM).wait()
    assert not {0, 75} & set(ended.codes)
    assert "could not be saved" in ended.err
    assert runs.look(out).status["status"] == "failed"
