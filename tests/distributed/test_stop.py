"""Asked to stop on any rank, all stop together; and nothing outlives the launcher, or waits for ever."""

import os
import signal
import time

import pytest

from distributed.test_coordinator import ends, one_sentence
from support.fault_jobs import alive


@pytest.mark.tier("thorough", keep=("SIGUSR1",))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name)
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


@pytest.mark.tier("thorough")
def test_a_second_signal_stops_all_at_once(rank, run):
    both = [rank(r) for r in (0, 1)]
    run.until(run.is_under_way)
    both[1].send(signal.SIGTERM, signal.SIGINT)
    ended = ends(both, 1, 1)
    assert not (run.path / "saved").exists()
    assert "stopped, because rank 1 failed: interrupted" in ended[0].err


@pytest.mark.tier("thorough")
def test_a_signal_before_all_have_come_stops_those_that_are_here(rank, run):
    both = [rank(r, size=3) for r in (0, 1)]
    time.sleep(1.5)  # until they wait for the third
    both[1].send(signal.SIGUSR1)
    assert "SIGUSR1 before a step was done" in ends(both, 75, 75)[1].err


@pytest.mark.tier("thorough", keep=("1",))
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_is_asked_before_it_meets_the_others_ends_them_all(rank, run, first):
    asked = rank(first, "wait=0.5")
    run.until((run.path / f"ready-{first}").exists)
    asked.send(signal.SIGTERM)
    assert "SIGTERM before a step was done" in ends([asked, rank(1 - first)], 75, 75)[0].err


@pytest.mark.tier("nightly", keep=("SIGINT",))
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_torchrun_hands_a_signal_on_and_its_processes_save(torchrun, run, number):
    """Ctrl-C is one request and not two."""
    launcher = torchrun()
    run.until(run.is_under_way)
    launcher.send(number)
    launcher.wait(20)
    assert run.text("status").startswith(f"preempted signal {number.value} after step ")
    assert run.text("saved") == run.text("step-of-1") + "\n"


@pytest.mark.tier("nightly")  # test_coordinator.py shows it without torchrun
def test_when_one_process_is_killed_torchrun_ends_the_others(torchrun, run):
    launcher = torchrun()
    run.until(run.is_under_way)
    os.kill(run.pid(1), signal.SIGKILL)
    assert launcher.wait(30).code == 1
    assert not alive(run.pid(0))
    assert "stopped sending heartbeats" in run.text("status")


@pytest.mark.tier("thorough")
def test_torchrun_shows_the_first_traceback_first_and_last(torchrun):
    ended = torchrun("raise=1@5").wait(30)
    assert ended.code == 1
    shown = ended.err
    assert shown.index("ValueError: the trouble of step 5") < shown.index("stopped, because rank 1 failed")
    assert "ValueError: the trouble of step 5" in shown[shown.index("Root Cause") :]
    assert "onnection closed" not in shown


@pytest.mark.tier("thorough")
def test_what_all_ranks_find_wrong_at_the_start_is_printed_once_under_torchrun(torchrun):
    """The second one is sent SIGTERM by torchrun while it looks why the first has ended."""
    ended = torchrun("raise=all@1", "error=user", "early=1").wait(30)
    assert ended.code == 1
    lines = [line for line in ended.err.splitlines() if line.startswith("rank:")]
    assert lines == ["rank: the trouble of step 1"]


@pytest.mark.tier("nightly", keep=("0",))
@pytest.mark.tier("thorough")  # test_coordinator.py names ranks without torchrun
@pytest.mark.parametrize("number", [0, 1])
def test_a_stopped_process_is_found_and_named(rank, run, number):
    """Rank 0 keeps the store, which is then silent too."""
    both = [rank(r, "hang_s=3") for r in (0, 1)]
    try:
        run.until(run.is_under_way)
        both[number].send(signal.SIGSTOP)
        (ended,) = ends([both[1 - number]], 1)
        assert "nothing moved for 3 s" in ended.err
        who = f"rank 1 (process {both[1].pid} on host" if number else "rank 0 or its launcher does not answer"
        assert who in ended.err
        assert "all_reduce" in run.text(f"hang/rank-{1 - number}.txt")
        assert "nothing moved" in run.text("status")
    finally:
        both[number].send(signal.SIGKILL)
        both[number].wait()


@pytest.mark.tier("thorough")  # test_coordinator.py names ranks without torchrun
def test_a_rank_that_never_arrives_is_named_with_the_stacks_of_all(rank, run):
    line = one_sentence(*ends([rank(r, "hang_s=3", "hang=1@7") for r in (0, 1)], 1, 1))
    assert "nothing moved for 3 s" in line
    assert str(run.path / "hang") in line
    assert "all_reduce" in run.text("hang/rank-0.txt")
    assert "coordinator_member.py" in run.text("hang/rank-1.txt")
    assert "all_reduce" not in run.text("hang/rank-1.txt")


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


@pytest.mark.tier("thorough")  # test_coordinator.py stops ranks without torchrun
def test_a_rank_in_a_place_without_return_is_ended_when_another_fails(rank):
    ended = ends([rank(r, "raise=0@5", "hang=1@5") for r in (0, 1)], 1, 1)
    assert "the trouble of step 5" in ended[0].err
