"""A8. The power is cut: what must be on the disk before a checkpoint gets its name."""

import re
import shutil
import subprocess
import sys

from narrowgauge.checkpoint import read_manifest, steps
from support.fault_table import case

SHORT = {"training.steps": 6, "checkpoint.every": 3}


def traced(runs, out, tmp_path):
    """("fsync", path) and ("rename", old, new) of a whole run, in their order; None where strace may not."""
    log = tmp_path / "strace"
    calls = "trace=fsync,fdatasync,rename,renameat,renameat2"
    command = ["strace", "-f", "-y", "-s", "4096", "-o", log, "-e", calls]
    words = [sys.executable, "-m", "narrowgauge", *runs.words(SHORT), "--out", out]
    ended = subprocess.run([*command, *words], capture_output=True, text=True)
    if "ptrace" in ended.stderr:
        return None
    assert ended.returncode == 0, ended.stderr
    return list(system_calls(log.read_text()))


def system_calls(text):
    """The finished calls of a log of strace, each where it ended."""
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


def recorded(runs, out, tmp_path):
    """The same, as Python sees it."""
    file = tmp_path / "syncs"
    record = {"kind": "record_syncs", "file": str(file)}
    runs.finish(runs.words(SHORT), out, faults=[record])
    return [tuple(line.split("\t")) for line in file.read_text().splitlines()]


@case("A8")
def test_a_step_gets_its_name_when_all_of_it_is_on_the_disk_and_then_the_name_too(runs, out, tmp_path):
    calls = traced(runs, out, tmp_path) if shutil.which("strace") else None
    calls = calls or recorded(runs, out, tmp_path)
    checkpoints = out / "checkpoints"
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
