"""A2 to A9. One rank, the launcher, at each point of a save: killed, the run continues to the same digits."""

import re
import signal
import time

import pytest

from narrowgauge.checkpoint import steps
from support.fault_jobs import alive
from support.fault_runs import contents
from support.fault_table import LATER, RANKS, case

KILL = signal.SIGKILL


@pytest.mark.tier("nightly", keep=("0",))
@case("A2", tier="thorough")  # each commit: distributed/test_stop.py, without a resume
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("ranks", [2], ids=["2 ranks"])
def test_one_rank_is_killed_and_the_job_ends(runs, out, victim, ranks):
    words = runs.words({"training.steps": 12})
    job = runs.torchrun(words, out, ranks)
    job.until(lambda: len(job.pids) == ranks).until(runs.look(out).has_step(7))
    start = time.monotonic()
    ended = job.send(KILL, rank=victim).wait(60)
    assert ended.failed
    assert time.monotonic() - start < 60
    assert not job.left
    runs.finish(words, out, ranks)
    assert runs.look(out).trajectory == runs.undisturbed({"training.steps": 12}, ranks).trajectory


SAVES = {"training.steps": 8, "checkpoint.every": 2}


def crash_and_go_on(runs, out, ranks, point):
    """Dies there in the first save of all, and in the next that comes there; then continues."""
    words, crashes, ended = runs.words(SAVES), 0, None
    for _ in range(2):
        ended = runs.start(words, out, ranks, NARROWGAUGE_CRASH_AT=point).wait()
        if set(ended.codes) == {0}:
            break
        assert 137 in ended.codes, (point, ended.err)
        crashes += 1
    assert crashes, f"{point} was never reached"
    if set(ended.codes) != {0}:
        runs.finish(words, out, ranks)
    assert runs.look(out).trajectory == runs.undisturbed(SAVES, ranks).trajectory, point
    assert not list((out / "checkpoints").glob("*.tmp-*")), point


@pytest.mark.tier("thorough")
@case("A3", tier="quick")
@pytest.mark.parametrize(
    "point",
    [
        "publish",
        "purging:step-2",
        *(pytest.param(point, marks=LATER) for point in ("write:manifest.json", "published")),
    ],
)
def test_a_kill_inside_a_save_leaves_no_trace(runs, out, point):
    crash_and_go_on(runs, out, 1, point)


@case("A3", "C4", "D5")
@RANKS
def test_a_kill_at_every_point_leaves_no_trace(runs, tmp_path, ranks):
    """Every point that the run itself passes, from the first file to the last, in turn."""
    file = tmp_path / "points"
    record = {"kind": "record_points", "file": str(file)}
    runs.finish(runs.words(SAVES), tmp_path / "recorded", ranks, faults=[record])
    points = dict.fromkeys(re.sub(r"step-\d+", "step-2", line) for line in file.read_text().splitlines())
    for moment in ("begun", "sealed", "publish", "published", "durable", "purge:step-2", "purging:step-2"):
        assert moment in points
    print(len(points), "points")
    for number, point in enumerate(points):
        crash_and_go_on(runs, tmp_path / str(number), ranks, point)


@case("A4", tier="thorough")
@RANKS
def test_workers_die_with_their_torchrun(runs, out, ranks):
    words = runs.words({"training.steps": 5000})
    job = runs.torchrun(words, out, ranks)
    job.until(lambda: len(job.pids) == ranks).until(runs.look(out).has_step(7))
    workers = job.pids
    job.processes[0].send(KILL)
    deadline = time.monotonic() + 5
    while any(map(alive, workers.values())) and time.monotonic() < deadline:
        time.sleep(0.01)
    survivors = [pid for pid in workers.values() if alive(pid)]
    if survivors:  # then at least no other process may write where they write
        assert "in use by process" in runs.start(words, out, ranks).wait().err
        job.kill()
    assert not survivors, "workers outlived their launcher by 5 s"
    newest_step = runs.look(out).column("step")[-1]
    again = runs.start(words, out, ranks).until(runs.look(out).has_step(newest_step + 1, resumes=1))
    assert set(again.send(signal.SIGTERM).wait().codes) == {75}


@case("A5", tier="thorough")
@RANKS
def test_a_second_job_is_told_who_has_the_run(runs, out, ranks):
    words = runs.words()
    first = runs.start(words, out, ranks).until(runs.look(out).has_step(2))
    second = runs.start(words, out, ranks).wait()
    assert second.failed
    assert f"in use by process {first.pids[0]} on host " in second.err
    assert set(first.wait().codes) == {0}
    assert runs.look(out).trajectory == runs.undisturbed(None, ranks).trajectory


@case("A6")
@RANKS
def test_resumed_and_killed_again_before_a_save(runs, out, ranks):
    words = runs.words({"checkpoint.every": 6})
    look = runs.look(out)
    runs.start(words, out, ranks).until(look.has_step(7)).kill()
    for resumes in (1, 2):  # each from the checkpoint of step 6, or of a later one where the process was fast
        arrived = look.has_step(steps(out / "checkpoints")[-1] + 1, resumes)
        runs.start(words, out, ranks).until(arrived).kill()
    runs.finish(words, out, ranks)
    assert look.trajectory == runs.undisturbed({"checkpoint.every": 6}, ranks).trajectory


@case("A6")
@RANKS
def test_killed_before_the_first_step_is_done(runs, out, ranks):
    words, metrics = runs.words(), out / "metrics.jsonl"
    for _ in range(2):
        die = {"kind": "stop", "how": "die", "steps": [1]}
        ended = runs.start(words, out, ranks, [die]).wait()
        assert 137 in ended.codes, ended.err
        assert '{"step": 0,' in metrics.read_text()
    runs.finish(words, out, ranks)
    assert runs.look(out).trajectory == runs.undisturbed(None, ranks).trajectory


@case("A6", tier="thorough")
@RANKS
def test_a_finished_run_is_left_as_it_is(runs, ranks):
    done = runs.undisturbed(None, ranks).path
    before = dict(contents(done))
    ended = runs.finish(runs.words(), done, ranks)
    assert "is done" in ended.out
    after = dict(contents(done))
    assert {name for name in before if before[name] != after[name]} <= {".lock", "report.html"}


@case("A7", tier="thorough")
@RANKS
def test_killed_between_micro_batches_and_across_epochs(runs, tmp_path, ranks):
    """Deaths inside steps 3, 9 and 17; the ids are those that were trained on, step by step."""
    changes = {"checkpoint.every": 4}
    words, tokens = runs.words(changes), {}
    for name, deaths in (("killed", (3, 9, 17)), ("undisturbed", ())):
        out, file = tmp_path / name, tmp_path / f"{name}.tokens"
        record = {"kind": "record_tokens", "file": str(file)}
        for step in deaths:
            die = {"kind": "stop", "how": "die", "steps": [step], "micro_batch": 1}
            assert 137 in runs.start(words, out, ranks, [record, die]).wait().codes
        runs.finish(words, out, ranks, faults=[record])
        lines = file.read_text().splitlines()
        tokens[name] = sorted(set(lines))
    assert tokens["killed"] == tokens["undisturbed"]
    assert runs.look(tmp_path / "killed").trajectory == runs.look(tmp_path / "undisturbed").trajectory
    sequences = 24 * 4
    assert len(tokens["undisturbed"]) == sequences
    assert len({line.partition(",")[2] for line in tokens["undisturbed"]}) < sequences, "no epoch was crossed"


@case("A9", tier="thorough")
@RANKS
def test_a_kill_while_a_save_is_written_behind_the_steps(runs, out, ranks):
    words, look = runs.words({"checkpoint.asynchronous": True}), runs.look(out)
    job = runs.start(words, out, ranks, [{"kind": "slow_disk", "seconds": 0.2}])
    pending = []

    def training_goes_on():
        pending[:] = [step for step in drafts(out) if look.has_step(step + 2)()]
        return bool(pending)

    job.until(training_goes_on).kill()
    assert pending[0] not in steps(out / "checkpoints")
    runs.finish(words, out, ranks)
    assert look.trajectory == runs.undisturbed(None, ranks).trajectory
    assert not drafts(out)


def drafts(out):
    """The steps that are being written, and have no name yet."""
    checkpoints = out / "checkpoints"
    found = [int(path.name.removeprefix("step-").split(".")[0]) for path in checkpoints.glob("step-*.tmp-*")]
    return [step for step in found if step > max(steps(checkpoints), default=0)]
