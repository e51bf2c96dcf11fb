"""D. Disks that are full, small, slow, read-only or gone; and what is kept on them."""

import json
import os
import re
import resource
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from narrowgauge.checkpoint import newest_valid, steps
from support.fault_runs import newest
from support.fault_table import RANKS, case

SHORT = {"training.steps": 12, "checkpoint.every": 3}
BEHIND = {"checkpoint.asynchronous": True}
NO_LIMIT = resource.RLIM_INFINITY


def limit_files(job, size):
    """From now on no rank may write beyond `size` bytes of a file, as on a full disk: in whichever thread."""
    for pid in job.pids.values():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, NO_LIMIT))


@case("D1")
@RANKS
def test_a_disk_that_is_full_for_a_while(runs, out, ranks):
    """Saves fail loudly, in the threads that write during steps; older ones stay, training continues; with
    room again it ends as undisturbed."""
    changes = {"training.steps": 100, "checkpoint.every": 5, "validation.every": 1000} | BEHIND
    words, look = runs.words(changes), runs.look(out)
    job = runs.start(words, out, ranks)

    def event(kind):
        return lambda: f'"event": "{kind}"' in (out / "metrics.jsonl").read_text()

    job.until(look.has_step(1)).until(event("save"))
    limit_files(job, 20_000)  # bytes; the weights need hundreds of thousands, the metrics grow on
    job.until(event("save failed"))
    kept = newest_valid(out / "checkpoints")
    assert kept[0] is not None
    assert kept[1] == [], "nothing half-written has a name"
    failed = f"step-{look.events('save failed')[0]['step']}.tmp-"  # the next may be under way
    assert not [name for name in os.listdir(out / "checkpoints") if name.startswith(failed)] or ranks > 1
    limit_files(job, NO_LIMIT)
    ended = job.wait()
    assert set(ended.codes) == {0}, ended.err
    assert ended.out.count("NOT SAVED") == len(look.events("save failed")) >= 1
    assert look.trajectory == runs.undisturbed(changes, ranks).trajectory


@case("D1", tier="thorough")
@RANKS
def test_the_last_save_must_not_fail(runs, out, ranks):
    changes = {"checkpoint.every": 20}
    words, look = runs.words(changes), runs.look(out)
    ended = runs.start(words, out, ranks, largest_file=50_000).wait()
    assert all(code in (1, 2) for code in ended.codes)
    assert "Traceback" not in ended.err
    assert "File too large" in ended.err
    assert ended.out.count("NOT SAVED") == 2, "the first one did not end the run"
    assert [event["step"] for event in look.events("save failed")] == [20, 24]
    assert look.status["status"] == "failed", "a run is not done without its weights"
    assert os.listdir(out / "checkpoints") == []
    runs.finish(words, out, ranks)
    assert look.trajectory == runs.undisturbed(changes, ranks).trajectory


@case("D1")
@RANKS
def test_saves_that_fail_again_and_again_end_the_run(runs, out, ranks):
    words = runs.words({"training.steps": 100, "checkpoint.every": 1})
    ended = runs.start(words, out, ranks, largest_file=150_000).wait()
    assert ended.failed
    failures = runs.look(out).events("save failed")
    assert 2 <= len(failures) <= 20, "not for ever"
    assert runs.look(out).status["status"] == "failed"


NAMESPACE = """
set -e
mount -t tmpfs -o {options} none {disk}
{before}
set +e
"$@"
code=$?
{after}
exit $code
"""


@pytest.fixture
def on_disk(tmp_path, cache):
    """Run a command with a separate, private file system at tmp_path/disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", disk], capture_output=True
    ).returncode:
        pytest.skip("this machine gives a user no mount of his own: unshare -rm")

    def run(words, options, before="", after=""):
        script = NAMESPACE.format(options=options, disk=disk, before=before, after=after)
        command = ["unshare", "-rm", "sh", "-c", script, "sh", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return run


def command(runs, changes, out):
    return [sys.executable, "-m", "narrowgauge", *runs.words(changes), "--out", out]


@case("D2", tier="thorough")
@pytest.mark.parametrize(
    ("options", "what"), [("size=600k", "free"), ("size=1g,nr_inodes=12", "inodes")], ids=["bytes", "inodes"]
)
def test_a_disk_too_small_is_refused_before_the_first_step(runs, tmp_path, on_disk, options, what):
    out, kept = tmp_path / "disk" / "run", tmp_path / "kept"
    ended = on_disk(command(runs, {}, out), options, after=f"cp -r {out} {kept}")
    assert ended.returncode in (1, 2), ended.stderr
    assert "Traceback" not in ended.stderr
    assert what in ended.stderr
    assert re.search(r"\d", ended.stderr), "with numbers"
    metrics = kept / "metrics.jsonl"
    assert not metrics.exists() or '"loss"' not in metrics.read_text()


WHEN_STEP_5 = "(until grep -qs '\"step\": 5,' {out}/metrics.jsonl; do sleep 0.01; done; {act}) &"


@case("D3")
@pytest.mark.parametrize(
    ("act", "says"),
    [
        ("mount -t tmpfs -o ro none {out}/checkpoints", "Read-only file system"),
        ("mv {out} {out}-elsewhere", "No such file or directory"),
        ("umount -l {disk}", "No such file or directory"),
    ],
    ids=["read-only", "directory gone", "mount gone"],
)
def test_a_directory_that_fails_under_a_run(runs, tmp_path, on_disk, act, says):
    disk = tmp_path / "disk"
    out = disk / "run"
    before = WHEN_STEP_5.format(out=out, act=act.format(disk=disk, out=out))
    ended = on_disk(command(runs, {"training.steps": 200}, out), "size=1g", before=before)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert says in ended.stderr
    assert str(out) in ended.stderr


@case("D3", tier="thorough")
def test_a_directory_that_cannot_be_written_from_the_start(runs, tmp_path, on_disk):
    disk = tmp_path / "disk"
    ended = on_disk(command(runs, {}, disk / "run"), "size=1g", before=f"mount -o remount,ro {disk}")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert str(disk / "run") in ended.stderr
    assert "Read-only file system" in ended.stderr


@case("D4", tier="thorough")
@RANKS
def test_a_slow_disk_does_not_slow_the_steps(runs, out, ranks):
    """A save takes seconds; the steps during it are not delayed, and saves do not pile up."""
    changes = {"training.steps": 100, "checkpoint.every": 30, "validation.every": 1000} | BEHIND
    most = []
    job = runs.start(runs.words(changes), out, ranks, [{"kind": "slow_disk", "seconds": 0.3}])
    while any(process.is_running for process in job.processes):
        if (out / "checkpoints").exists():
            names = os.listdir(out / "checkpoints")
            most.append(
                len([n for n in names if ".tmp-" in n and int(n[5:].split(".")[0]) > newest_number(out)])
            )
        time.sleep(0.01)
    assert set(job.wait().codes) == {0}
    assert max(most) <= 1, "a second save waits for the first"
    look = runs.look(out)
    steps_ms = sorted(look.column("step_ms")[1:])
    times = look.column("step_ms")[30:60]  # during the save of step 30
    assert sorted(times)[len(times) // 2] < 1.5 * steps_ms[len(steps_ms) // 2] + 5
    done = [line for line in look.lines if line.get("event") == "save" or "loss" in line]
    at = next(i for i, line in enumerate(done) if line.get("event") == "save" and line["step"] == 30)
    assert done[at - 1]["step"] > 31, "steps went on while step 30 was written"
    assert look.trajectory == runs.undisturbed(changes, ranks).trajectory


def newest_number(out):
    return max(steps(out / "checkpoints"), default=0)


@case("D5")
@RANKS
def test_a_hundred_saves_keep_two_at_every_moment(runs, out, ranks):
    changes = {"training.steps": 100, "checkpoint.every": 1, "validation.every": 1000}
    job = runs.start(runs.words(changes), out, ranks)
    seen = []
    while any(process.is_running for process in job.processes):
        seen.append(steps(out / "checkpoints"))
        time.sleep(0.001)
    assert set(job.wait().codes) == {0}
    full = [there for there in seen if there and there[-1] >= 3]
    assert len(full) > 50
    assert all(len(there) >= 2 for there in full), "never fewer than two"
    assert all(len(there) <= 3 for there in full), "nor more than it keeps and the newest"
    assert all(a[-1] <= b[-1] for a, b in pairwise(full)), "the newest never goes back"
    assert steps(out / "checkpoints") == [99, 100]


@case("D5")
def test_only_valid_checkpoints_count_as_kept(runs, out):
    """One of those that are kept is damaged between two stops: an older valid one stays in its stead."""
    changes = {"training.steps": 12, "checkpoint.every": 3, "checkpoint.keep": 2}
    stopped = {"kind": "signals", "name": "SIGTERM", "steps": [7]}
    runs.start(runs.words(changes), out, faults=[stopped]).wait()
    assert steps(out / "checkpoints") == [6, 7]
    file = newest(out) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    stopped = {"kind": "signals", "name": "SIGTERM", "steps": [8]}
    runs.start(runs.words(changes), out, faults=[stopped]).wait()
    assert {6, 8} <= set(steps(out / "checkpoints")), "step 7 stands for nothing"
    runs.finish(runs.words(changes), out)
    assert newest_valid(out / "checkpoints")[1] == []
    assert json.loads((out / "status.json").read_text())["status"] == "done"
