"""Asked to stop, a run saves once, says so with exit code 75, and goes on to the same digits."""

import os
import signal

import pytest

from narrowgauge.checkpoint import steps

CHANGES = {
    "training.steps": 30,
    "checkpoint.every": 100,
    "validation.every": 7,
    "recipe.name": "nvfp4",
}


@pytest.fixture
def words(line):
    return line(CHANGES)


@pytest.fixture(scope="module")
def expected(narrowgauge, line, tmp_path_factory):
    """The directory of the run that nobody disturbed."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    ended = narrowgauge(*line(CHANGES), "--out", path)
    assert ended.code == 0, ended.err
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name)
def test_one_save_exit_75_and_the_same_line_goes_on(narrowgauge, words, expected, look, tmp_path, number):
    out = tmp_path / "run"
    ended = narrowgauge.start(*words, "--out", out).send_when(look(out).has_step(4), number)
    assert ended.code == 75, ended.err
    run = look(out)
    (step,) = steps(out / "checkpoints")
    assert 4 <= step < 30
    assert ended.err == f"narrowgauge: stopped by {number.name} after step {step}; the same line continues\n"
    assert run.status["status"] == "preempted"
    assert number.name in run.status["reason"]
    assert run.column("step") == list(range(1, step + 1))
    assert [event["step"] for event in run.events("save")] == [step]
    (stop,) = run.events("stop")
    assert (stop["step"], stop["reason"]) == (step, number.name)
    ended = narrowgauge(*words, "--out", out)
    assert ended.code == 0, ended.err
    assert f"continuing {out} after step {step}" in ended.out
    assert run.trajectory == look(expected).trajectory
    assert run.status["status"] == "done"


def test_stops_again_and_again_leave_no_trace(narrowgauge, words, expected, look, tmp_path):
    out = tmp_path / "run"
    step = 0
    for resumes in range(3):
        arrived = look(out).has_step(step + 1, resumes)
        ended = narrowgauge.start(*words, "--out", out).send_when(arrived, signal.SIGTERM)
        assert ended.code == 75, ended.err
        step = steps(out / "checkpoints")[-1]
        if step > 20:
            break
    assert narrowgauge(*words, "--out", out).code == 0
    assert look(out).trajectory == look(expected).trajectory


def test_a_signal_while_starting_stops_it_too(narrowgauge, words, expected, look, tmp_path):
    out = tmp_path / "run"
    ended = narrowgauge.start(*words, "--out", out).send_when((out / "config.toml").exists, signal.SIGUSR1)
    assert ended.code == 75, ended.err
    assert look(out).status["status"] == "preempted"
    assert narrowgauge(*words, "--out", out).code == 0
    assert look(out).trajectory == look(expected).trajectory


@pytest.mark.parametrize("pair", [(signal.SIGTERM, signal.SIGINT), (signal.SIGUSR1, signal.SIGTERM)], ids=str)
def test_a_second_signal_stops_at_once(narrowgauge, words, expected, look, tmp_path, pair):
    out = tmp_path / "run"
    ended = narrowgauge.start(*words, "--out", out).send_when(look(out).has_step(4), *pair)
    assert ended.code == 1
    assert ended.err == "narrowgauge: interrupted\n"
    assert steps(out / "checkpoints") == [], "no save"
    assert look(out).status["status"] == "failed"
    assert narrowgauge(*words, "--out", out).code == 0
    assert look(out).trajectory == look(expected).trajectory


def test_the_last_save_must_not_fail(narrowgauge, line, expected, look, tmp_path):
    out = tmp_path / "run"
    words = line(CHANGES | {"checkpoint.every": 20})
    ended = narrowgauge(*words, "--out", out, largest_file=50_000)  # bytes; the weights need 130 thousand
    assert ended.code in (1, 2)
    assert "Traceback" not in ended.err
    assert "File too large" in ended.err
    assert ended.out.count("NOT SAVED") == 2, "the first one did not end the run"
    assert [event["step"] for event in look(out).events("save failed")] == [20, 30]
    assert look(out).status["status"] == "failed", "a run is not done without its weights"
    assert os.listdir(out / "checkpoints") == []
    assert narrowgauge(*words, "--out", out).code == 0
    assert look(out).trajectory == look(expected).trajectory


def test_a_stop_that_cannot_save_does_not_say_it_did(narrowgauge, words, look, tmp_path):
    out = tmp_path / "run"
    process = narrowgauge.start(*words, "--out", out, largest_file=50_000)
    ended = process.send_when(look(out).has_step(4), signal.SIGTERM)
    assert ended.code not in (0, 75)
    assert "could not be saved" in ended.err
    assert look(out).status["status"] == "failed"
