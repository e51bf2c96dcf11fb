"""A8 and D. Disks that lose power, are full, small, slow, read-only or gone; and what is kept on them."""

import re
import resource
import shutil
import subprocess
import sys

import pytest

from narrowgauge.trainer.checkpoint import newest_valid, read_manifest, steps
from support.fault_table import RANKS, case

BEHIND = {"checkpoint.asynchronous": True}


@case("D1")  # each commit: checkpoint/store/test_save.py and test_ranks.py
@RANKS
def test_a_disk_that_is_full_for_a_while(runs, out, ranks):
    """Saves fail loudly, in the threads that write during steps; older ones stay, training continues; with
    room again it ends as undisturbed."""
    changes = {"training.steps": 100, "checkpoint.every": 5, "validation.every": 1000} | BEHIND
    look, job = runs.look(out), runs.start(runs.words(changes), out, ranks)

    def event(kind):
        return lambda: f'"event": "{kind}"' in (out / "metrics.jsonl").read_text()

    job.until(look.has_step(1)).until(event("save")).limit_files(20_000)  # the weights need more
    job.until(event("save failed"))
    path, refused = newest_valid(out / "checkpoints")
    assert path is not None
    assert refused == [], "nothing half-written has a name"
    job.limit_files(resource.RLIM_INFINITY)
    ended = job.wait()
    assert set(ended.codes) == {0}, ended.err
    assert ended.out.count("NOT SAVED") == len(look.events("save failed")) >= 1
    assert look.trajectory == runs.undisturbed(changes, ranks).trajectory


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
WHEN_STEP_5 = "(until grep -qs '\"step\": 5,' {out}/metrics.jsonl; do sleep 0.01; done; {act}) &"
GONE, READ_ONLY = "No such file or directory", "Read-only file system"
#: The options of a disk, what is done to it at the start or under the run, and the words that say so.
DISKS = {
    "read-only from the start": ("size=1g", "mount -o remount,ro {disk}", "", READ_ONLY),
    "too few bytes": ("size=600k", "", "", r"\d.* free"),
    "too few inodes": ("size=1g,nr_inodes=12", "", "", r"\d inodes"),
    "read-only": ("size=1g", "", "mount -t tmpfs -o ro none {out}/checkpoints", READ_ONLY),
    "directory gone": ("size=1g", "", "mv {out} {out}-elsewhere", GONE),
    "mount gone": ("size=1g", "", "umount -l {disk}", GONE),
}


@pytest.mark.tier("nightly", keep=("read-only from the start",))
@case("D2", "D3", tier="thorough")
@pytest.mark.parametrize("kind", DISKS)
def test_a_disk_that_fails_from_the_start_or_under_a_run_is_named(runs, tmp_path, cache, kind):
    """On a private file system of its own."""
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine gives a user no mount of his own: unshare -rm")
    options, before, act, words = DISKS[kind]
    out, after = disk / "run", "" if act else "cp -r {out} {kept}"
    lines = {"before": WHEN_STEP_5.format(out="{out}", act=act) if act else before, "after": after}
    texts = {name: line.format(out=out, disk=disk, kept=kept) for name, line in lines.items()}
    script = NAMESPACE.format(options=options, disk=disk, **texts)
    command = [sys.executable, "-m", "narrowgauge", *runs.words({"training.steps": 200}), "--out", out]
    shell = ["unshare", "-rm", "sh", "-c", script, "sh", *map(str, command)]
    ended = subprocess.run(shell, capture_output=True, text=True, timeout=120)
    assert ended.returncode in ((1,) if act else (1, 2)), ended.stderr
    assert "Traceback" not in ended.stderr
    assert re.search(words, ended.stderr), ended.stderr
    assert str(out) in ended.stderr
    metrics = kept / "metrics.jsonl"
    assert not metrics.exists() or '"loss"' not in metrics.read_text()


def system_calls(text):
    """("fsync", path) and ("rename", old, new) of a log of strace, each where it ended."""
    begun = {}
    for line in text.splitlines():
        thread, _, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            begun[thread] = call.removesuffix("<unfinished ...>")
            continue
        call = begun.pop(thread, "") + re.sub(r"^<\.\.\. \w+ resumed>\s*", "", call)
        if not call.endswith("= 0"):
            continue
        if found := re.match(r"f(?:data)?sync\(\d+<(.+?)>\s*\)", call):
            yield ("fsync", found[1])
        elif call.startswith("rename") and len(names := re.findall(r'"(.+?)"', call)) == 2:
            yield ("rename", *names)


@case("A8")  # each commit: checkpoint/store/test_crash_points.py
def test_a_step_gets_its_name_when_all_of_it_is_on_the_disk_and_then_the_name_too(runs, out, tmp_path):
    log, watched = tmp_path / "strace", "trace=fsync,fdatasync,rename,renameat,renameat2"
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: the order of the system calls cannot be watched")
    words = runs.words({"training.steps": 6, "checkpoint.every": 3})
    command = [
        "strace",
        "-f",
        "-y",
        "-s",
        "4096",
        "-o",
        log,
        "-e",
        watched,
        sys.executable,
        "-m",
        "narrowgauge",
    ]
    ended = subprocess.run([*command, *words, "--out", out], capture_output=True, text=True)
    if "ptrace" in ended.stderr:
        pytest.skip("strace may not trace here")
    assert ended.returncode == 0, ended.stderr
    calls, checkpoints = list(system_calls(log.read_text())), out / "checkpoints"
    assert steps(checkpoints) == [3, 6]
    for step in (3, 6):
        final = checkpoints / f"step-{step}"
        (at,) = [i for i, c in enumerate(calls) if c[0] == "rename" and c[2] == str(final)]
        draft = calls[at][1]
        before = [call[1] for call in calls[:at] if call[0] == "fsync"]
        manifest = before.index(f"{draft}/manifest.json")
        for name in read_manifest(final).files:
            assert f"{draft}/{name}" in before[:manifest], f"{name} is synced before it is listed"
        assert draft in before[manifest:], "the names in the draft are synced after the last of them was made"
        assert ("fsync", str(checkpoints)) in calls[at:], "the new name is synced"
        assert ("fsync", str(out / "metrics.jsonl")) in calls[:at], "steps are told before they are claimed"
    assert ("fsync", str(out)) in calls[: calls.index(("rename", draft, str(final)))]
