"""F6 and G2 to G8. Processes: killed, stopped, leaking, badly started, without room for records."""

import json
import os
import signal
import time

import psutil
import pytest

from support.fault_jobs import alive, descendants
from support.fault_table import LATER, RANKS, case


@case("G2", tier="thorough")
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=LATER)])
def test_a_rank_that_is_stopped_is_found_with_the_stack_of_the_other(runs, out, victim):
    words = [*runs.words({"training.steps": 400}), "--training.hang_timeout", "4"]
    job = runs.start(words, out, 2).until(runs.look(out).has_step(6)).send(signal.SIGSTOP)
    time.sleep(6)  # a job that is suspended, even for longer than a hang may take, goes on
    job.send(signal.SIGCONT).until(runs.look(out).has_step(runs.look(out).column("step")[-1] + 3))
    job.send(signal.SIGSTOP, rank=victim)
    job.until(lambda: not job.processes[1 - victim].is_running)
    ended = job.send(signal.SIGKILL, rank=victim).wait()
    assert ended.failed
    assert f"rank {victim}" in ended.err
    stacks = out / "hang" / f"rank-{1 - victim}.txt"
    assert 'File "' in stacks.read_text(), "where the other one waited"
    assert runs.look(out).status["status"] == "failed"
    again = runs.start(words, out, 2).until(runs.look(out).has_step(7, resumes=1))
    assert set(again.send(signal.SIGTERM).wait().codes) == {75}


@case("G5")
@RANKS
def test_a_clock_that_is_set_back(runs, out, ranks):
    runs.finish(runs.words(), out, ranks, faults=[{"kind": "clock", "after_s": 0.3, "back_s": 3600.0}])
    look = runs.look(out)
    assert all(ms > 0 for ms in look.column("step_ms"))
    assert look.trajectory == runs.undisturbed(None, ranks).trajectory


def holdings(pid):
    """What a process holds: bytes of memory, files, threads."""
    process = psutil.Process(pid)
    return process.memory_info().rss, process.num_fds(), process.num_threads()


@case("G6", tier="thorough")
@pytest.mark.parametrize(
    ("ranks", "count"), [(1, 300), pytest.param(1, 1000, marks=LATER), pytest.param(2, 1000, marks=LATER)]
)
def test_hundreds_of_steps_leak_nothing(runs, out, ranks, count):
    changes = {"training.steps": count, "checkpoint.every": 25, "validation.every": 50, "log.every": 100}
    shared = set(os.listdir("/dev/shm"))
    job = runs.start(runs.words(changes), out, ranks).until(runs.look(out).has_step(5))
    seen = {rank: [] for rank in range(ranks)}
    before_the_end = runs.look(out).has_step(count - 5)  # with its sample of text it is another matter
    while not before_the_end():
        for rank, pid in job.pids.items():
            seen[rank].append(holdings(pid))
        time.sleep(0.05)
    assert set(job.wait().codes) == {0}
    for samples in seen.values():
        assert len(samples) > 20
        half = samples[len(samples) // 2 :]
        first, last = half[: len(half) // 4], half[-(len(half) // 4) :]
        (m1, f1, t1), (m2, f2, t2) = zip(*first, strict=True), zip(*last, strict=True)
        assert sum(m2) / len(m2) < 1.01 * sum(m1) / len(m1), "memory"
        # what leaks is there at every moment; a file or a thread may be seen that is about to go
        assert min(f2) <= min(f1), "files"
        assert min(t2) <= min(t1), "threads"
    assert set(os.listdir("/dev/shm")) <= shared


@case("G8", tier="thorough")
def test_a_report_that_cannot_be_written_does_not_undo_the_run(runs, out):
    """The page is one reader of the record among others: the record is complete without it."""
    job = runs.start(runs.words(), out).until(runs.look(out).has_step(2))
    (out / "report.html").mkdir()
    ended = job.wait()
    assert "Traceback" not in ended.err
    assert ended.codes != [0]
    assert "report.html" in ended.err
    assert runs.look(out).status["status"] == "done"
    assert runs.look(out).trajectory == runs.undisturbed().trajectory


@case("F6", tier="thorough")
def test_a_worker_that_is_killed_is_missed_and_the_same_line_goes_on(narrowgauge, tmp_path):
    """Training reads through a thread; only prepare reads through processes."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text(8000 * (json.dumps({"text": 40 * "narrow gauge "}) + "\n"))
    words = ["prepare", lines, "--tokenizer", "bpe-300", "--workers", "2", "--out", tmp_path / "out"]
    process = narrowgauge.start(*words)

    def workers():  # the processes that the fork server of the process has started
        return sorted(descendants(process.pid) - descendants(process.pid, depth=1))

    process.until(lambda: bool(workers()))
    worker = workers()[0]
    os.kill(worker, signal.SIGKILL)
    ended = process.wait(60)
    assert ended.code == 2
    assert "one of 2 workers was killed" in ended.err
    assert not alive(worker)
    assert not (tmp_path / "out").exists()
    assert narrowgauge(*words).code == 0
