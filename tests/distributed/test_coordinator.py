"""Ranks meet, stop together, and name the one that failed; tests/faults does more to whole trainings."""

import signal
import socket

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import steps
from narrowgauge.trainer.distributed import World
from narrowgauge.trainer.distributed.process_group.store import open_store, register
from support.fault_jobs import free_port

LONG = {"training.steps": 2000, "checkpoint.every": 10_000}


def world(number, size, port, host="localhost"):
    return World(number, size, number, size, host, port)


def refusal(function, *given, **options):
    with pytest.raises(UserError) as error:
        function(*given, **options)
    return str(error.value)


def test_ranks_that_cannot_meet_are_told_why():
    port = free_port()
    nowhere = refusal(open_store, world(1, 2, port, "no host..here"), {}, 300)
    assert "no host has the name 'no host..here'" in nowhere
    assert "finds no store at localhost:" in refusal(open_store, world(1, 2, port), {}, 0.2)
    store = open_store(world(0, 4, port), {}, 5, keep=True)
    in_use = f"port {port}, at which the ranks were to meet, is in use on this host; set MASTER_PORT"
    assert in_use in refusal(open_store, world(0, 4, port), {}, 5, keep=True)
    store.set("here/2", '"process 7 on host other"')
    missing = refusal(register, store, world(0, 4, port), 0.5)
    assert "2 of 4 ranks are here, and ranks 1, 3 missing" in missing
    assert "rank 2 has joined already, as process 7" in refusal(register, store, world(2, 4, port), 0.5)
    assert "with the same WORLD_SIZE" in refusal(register, store, world(1, 3, port), 0.5)


def test_something_else_at_the_port_is_an_error():
    port = free_port()
    with socket.create_server(("localhost", port)):
        assert f"localhost:{port}" in refusal(open_store, world(1, 2, port), {}, 0.5)


def test_runs_of_one_launcher_are_separate_by_name():
    one = world(0, 1, free_port())
    store = open_store(one, {"NARROWGAUGE_RENDEZVOUS": "one"}, 5, keep=True)
    store.set("key", "value")
    assert open_store(one, {"NARROWGAUGE_RENDEZVOUS": "one"}, 5).check(["key"])
    assert not open_store(one, {"NARROWGAUGE_RENDEZVOUS": "two"}, 5).check(["key"])


@pytest.mark.tier("thorough")
def test_a_signal_to_one_rank_stops_all_after_one_step_and_one_save(runs, out):
    job = runs.start(runs.words(LONG), out, 2).until(runs.look(out).has_step(3))
    ended = job.send(signal.SIGUSR1, rank=1).wait()
    assert ended.codes == [75, 75], ended.err
    (step,) = steps(out / "checkpoints")
    assert runs.look(out).column("step")[-1] == step
    assert f"stopped by SIGUSR1 after step {step}" in ended.err


@pytest.mark.tier("thorough")
def test_an_error_that_all_ranks_have_is_printed_once(runs, out):
    ended = runs.start(runs.words(LONG), out, 2, [{"kind": "stop", "how": "raise", "steps": [5]}]).wait()
    assert ended.failed
    assert ended.err.count("Traceback (most recent call last)") == 1


@pytest.mark.tier("thorough")
def test_a_run_is_in_use_while_any_rank_lives(runs, out):
    job = runs.start(runs.words(LONG), out, 2).until(runs.look(out).has_step(3))
    job.send(signal.SIGSTOP, rank=1).send(signal.SIGKILL, rank=0)
    again = runs.start(runs.words(LONG), out, 2).wait()
    assert f"is in use by process {job.pids[1]} on host" in again.err
    assert set(again.codes) == {2}
