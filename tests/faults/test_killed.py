"""A. Killed at any moment, the same line again: every digit is that of the undisturbed run.

Points inside a save: `checkpoint/store/test_crash_points.py`; each recipe: `training/step/test_recipes.py`.
"""

import os
import random
import secrets
import signal
import socket
import time

import pytest

from support.fault_jobs import alive, descendants
from support.fault_runs import WIDE, contents, continues
from support.fault_table import LATER, RANKS, case

KILL = signal.SIGKILL
NVFP4 = {"recipe.name": "nvfp4"}


def die(step, micro_batch=0):
    return {"kind": "stop", "how": "die", "steps": [step], "micro_batch": micro_batch}


@case("A1", "A6", "A7", "E6", "G7", tier="thorough")
@RANKS
def test_deaths_inside_steps_leave_no_trace(runs, out, ranks):
    """At step 0, twice without a save between, in the middle of accumulation, in a second epoch; the next
    process ignores the lock, the draft and the torn line that a dead process leaves behind."""
    changes = NVFP4 | {"checkpoint.every": 4}
    for step in (1, 3, 9, 10, 17):
        job = runs.start(runs.words(changes), out, ranks, [die(step, micro_batch=1)])
        assert -KILL in job.wait().codes
        assert f"process {job.pids[0]} " in (out / ".lock").read_text()
    (out / "checkpoints" / "step-20.tmp-0000dead").mkdir()
    (out / ".status.json.tmp-0000dead").write_text("{")
    with (out / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 17, "loss"')
    continues(runs, out, changes, ranks)
    before = dict(contents(out))
    assert "is done" in runs.finish(runs.words(changes), out, ranks).out
    after = dict(contents(out))
    assert {name for name in before if before[name] != after[name]} <= {".lock", "report.html"}


@case("A1", "E6")
@RANKS
@pytest.mark.parametrize("name", ["bf16", "fp8-delayed", "mxfp8", "nvfp4", "msamp-o2"])
def test_fifty_kills_leave_no_trace(runs, tmp_path, name, ranks):
    """SIGKILL of all ranks at random moments, in as many runs as that takes."""
    changes, seed = (WIDE if name == "msamp-o2" else {}) | {"recipe.name": name}, secrets.randbits(32)
    print(f"delays from random.Random({seed})")
    rng, longest, kills = random.Random(seed), runs.seconds(changes, ranks), 0
    while kills < 50:
        out = tmp_path / f"killed-{kills}"
        while kills < 50:
            job = runs.start(runs.words(changes), out, ranks)
            time.sleep(rng.uniform(0, longest))
            ended = job.kill()
            assert "Traceback" not in ended.err
            if set(ended.codes) == {0}:
                break
            kills += 1
        if not (out / "status.json").exists() or runs.look(out).status["status"] != "done":
            continues(runs, out, changes, ranks)
        assert runs.look(out).trajectory == runs.undisturbed(changes, ranks).trajectory
        assert len(runs.look(out).events("done")) == 1


@case("A2", "G3", tier="thorough")
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=LATER)])
@pytest.mark.parametrize("how", ["die", "raise"])
def test_one_rank_of_two_ends_and_the_job_ends(runs, out, how, victim):
    """The other one does not wait for ever, and the traceback is that of the rank that failed."""
    fault = {"kind": "stop", "how": how, "steps": [7], "rank": victim}
    job = runs.start(runs.words(), out, 2, [fault])
    ended = job.wait(60)
    assert ended.failed
    assert not job.left
    if how == "die" and victim == 1:
        who = f"rank 1 (process {job.pids[1]} on host {socket.gethostname()}) stopped sending heartbeats"
        assert who in ended.err
        assert who in runs.look(out).status["reason"]
    if how == "raise":
        assert ended.err.count("Traceback (most recent call last)") == 1
        assert "RuntimeError: the fault that was asked for" in ended.err
        assert "the fault that was asked for" in runs.look(out).status["reason"]
    continues(runs, out, None, 2)


@case("A4", tier="thorough")
@RANKS
def test_workers_die_with_their_torchrun(runs, out, ranks):
    words = runs.words({"training.steps": 5000})
    job = runs.torchrun(words, out, ranks).until(runs.look(out).has_step(7))
    workers = descendants(job.pids[0], depth=1)
    assert len(workers) == ranks
    job.kill()
    deadline = time.monotonic() + 20
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    survivors = [pid for pid in workers if alive(pid)]
    for pid in survivors:
        os.kill(pid, KILL)
    assert not survivors, "workers outlived their launcher"
    newest = runs.look(out).column("step")[-1]
    again = runs.start(words, out, ranks).until(runs.look(out).has_step(newest + 1, resumes=1))
    assert set(again.send(signal.SIGTERM).wait().codes) == {75}
