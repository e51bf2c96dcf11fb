"""D. Disks that are small, read-only or gone; those that fail for a while: runs/loop/test_disk.py."""

import re
import subprocess
import sys

import pytest

from support.fault_table import case

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
