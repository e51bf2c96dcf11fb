"""Ranks meet, agree, stop together, and fail with one error that is printed once; real processes and signals.

tests/faults stops, kills and interrupts ranks of whole trainings.
"""

import signal
import socket

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.distributed import World
from narrowgauge.trainer.distributed.process_group.rendezvous import open_store


def ends(processes, *codes):
    """How they end, which must be with these codes."""
    ended = [p.wait() for p in processes]
    assert [e.code for e in ended] == list(codes), ended
    return ended


def one_sentence(*ended):
    """The only line that all of these processes have printed."""
    (line,) = [line for e in ended for line in e.err.splitlines()]
    return line


def test_two_ranks_meet_agree_and_are_done(rank, run):
    ended = ends([rank(r, "steps=30") for r in (0, 1)], 0, 0)
    assert [e.err for e in ended] == ["", ""]
    assert run.text("status") == "done"


@pytest.mark.parametrize("number", [0, 1])
def test_a_name_that_no_host_has_is_refused_at_once_by_every_rank(number):
    world = World(number, 2, number, 2, 0, 1, "no host..here", 29500)
    with pytest.raises(UserError, match=r"no host has the name 'no host\.\.here'.*set MASTER_ADDR"):
        open_store(world, {}, 300, keep=number == 0)


#: The ranks that come and the size that each was told, for how long they wait, what is printed once.
NO_MEETING = {
    "nobody": ([(1, 2)], 1, "finds no store at localhost:"),
    "other sizes": ([(0, 2), (1, 3)], 5, "start all of them with the same WORLD_SIZE"),
    "one twice": ([(0, 3), (1, 3), (1, 3)], 5, "rank 1 has joined already, as process"),
    "two missing": ([(0, 4), (2, 4)], 2, "2 of 4 ranks are here, and ranks 1, 3 missing"),
}


@pytest.mark.tier("thorough", keep=("nobody", "other sizes", "one twice"))
@pytest.mark.parametrize("kind", NO_MEETING)
def test_ranks_that_cannot_meet_say_why_once(rank, kind):
    come, seconds, says = NO_MEETING[kind]
    started = [rank(number, f"rendezvous_s={seconds}", size=size) for number, size in come]
    assert says in one_sentence(*ends(started, *[2] * len(come)))


def test_a_port_in_use_is_named_with_the_fix(rank, port):
    with socket.create_server(("", port)):
        (ended,) = ends([rank(0)], 2)
    for words in (f"port {port}", "is in use", "set MASTER_PORT to a free one"):
        assert words in one_sentence(ended)


def test_runs_of_one_launcher_are_separate_by_name(port):
    world = World(0, 1, 0, 1, 0, 1, "localhost", port)
    store = open_store(world, {"NARROWGAUGE_RENDEZVOUS": "one"}, 5, keep=True)
    store.set("key", "value")
    same = open_store(world, {"NARROWGAUGE_RENDEZVOUS": "one"}, 5)
    other = open_store(world, {"NARROWGAUGE_RENDEZVOUS": "two"}, 5)
    assert same.check(["key"])
    assert not other.check(["key"])


@pytest.mark.tier("thorough", keep=("0",))
@pytest.mark.parametrize("number", [0, 1])
def test_the_traceback_of_the_rank_that_failed_is_the_one_to_read(rank, run, number):
    ended = ends([rank(r, f"raise={number}@10") for r in (0, 1)], 1, 1)
    lines = [line.removeprefix(f"[rank{number}]: ") for line in ended[number].err.splitlines()]
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == ["ValueError: the trouble of step 10", f"rank {number} of 2"]
    cause = f"stopped, because rank {number} failed: ValueError: the trouble of step 10"
    other = f"rank: {cause}\n" if number == 1 else ""
    assert ended[1 - number].err == other, "one line, from one process of each node"
    assert cause in run.text("status") or number == 0
    assert "the trouble of step 10" in run.text(f"errors/rank-{number}.txt")
    assert "onnection closed" in run.text(f"errors/rank-{1 - number}.txt")


def test_an_error_that_all_ranks_have_is_printed_once(rank):
    ended = ends([rank(r, "raise=all@5", "error=user") for r in (0, 1)], 2, 2)
    assert one_sentence(*ended) == "rank: the trouble of step 5"


@pytest.mark.tier("thorough", keep=("0",))
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_is_killed_is_detected_by_its_silence(rank, run, port, number):
    both = [rank(r) for r in (0, 1)]
    run.until(run.is_under_way)
    both[number].send(signal.SIGKILL)
    ended = ends([both[number], both[1 - number]], -signal.SIGKILL, 1)
    who = f"rank 1 (process {both[1].pid} on host {socket.gethostname()}) stopped sending heartbeats"
    if number == 1:
        assert who in one_sentence(ended[1])
        assert who in run.text("status")
    else:  # it kept the store, and wrote the status
        assert "Traceback" not in ended[1].err
        assert "rank 0 failed" in run.text("status")
        assert f"rank 0 failed: it or its launcher is gone from localhost:{port}" in ended[1].err


@pytest.mark.tier("thorough", keep=("SIGUSR1",))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_signal_to_one_rank_stops_all_after_one_step_and_one_save(rank, run, number):
    both = [rank(r) for r in (0, 1)]
    run.until(run.is_under_way)
    both[number % 2].send(number)
    ended = ends(both, 75, 75)
    step = run.text("step-of-0")
    assert run.text("step-of-1") == step
    assert run.text("saved") == f"{step}\n"
    assert run.text("status") == f"preempted signal {number.value} after step {step}"
    assert ended[0].err == f"rank: signal {number.value} after step {step}\n"


@pytest.mark.tier("thorough", keep=("1",))
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_is_asked_before_it_meets_the_others_ends_them_all(rank, run, first):
    asked = rank(first, "wait=0.5")
    run.until((run.path / f"ready-{first}").exists)
    asked.send(signal.SIGTERM)
    assert "SIGTERM before a step was done" in ends([asked, rank(1 - first)], 75, 75)[0].err


def test_a_run_is_in_use_while_any_rank_lives(rank, run, port):
    both = [rank(r, "hang_s=60") for r in (0, 1)]
    run.until(run.is_under_way)
    try:
        both[1].send(signal.SIGSTOP)
        both[0].send(signal.SIGKILL)
        both[0].wait()
        again = ends([rank(r, MASTER_PORT=str(port + 1)) for r in (0, 1)], 2, 2)
        assert f"is in use by process {both[1].pid} on host" in one_sentence(*again)
    finally:
        both[1].send(signal.SIGKILL)
        both[1].wait()
    ends([rank(r, "steps=3", MASTER_PORT=str(port + 2)) for r in (0, 1)], 0, 0)  # nothing that is left blocks
