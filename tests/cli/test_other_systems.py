"""Systems that lack what POSIX has, as Windows does: what works there, and the sentence for what does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import narrowgauge as ng

# torch and the other packages run on Windows: they are imported before these parts of Python are taken away.
CHILD = """
import torch, torch.distributed.tensor, torch.distributed.fsdp, torch.distributed.pipelining
import torch.distributed.checkpoint
import pydantic, rich.console, rich.live, rich.progress, rich.table, safetensors.torch, tokenizers
import json, os, shutil, signal, sys, types
shutil.disk_usage = lambda path: types.SimpleNamespace(total=2**40, used=0, free=2**40)  # Windows has its own
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM", "SIGKILL"):
    delattr(signal, name)
for name in ("fork", "pread", "statvfs", "sysconf", "confstr", "sched_getaffinity", "setpriority",
             "getpriority", "mkfifo", "getuid", "geteuid", "killpg", "O_DIRECTORY", "O_NOFOLLOW"):
    delattr(os, name)

import narrowgauge as ng
import narrowgauge.system.operating_system
from narrowgauge.trainer.cli.main import main

narrowgauge.system.operating_system.sys = types.SimpleNamespace(platform="win32")  # its name, and no more

for name in ng.__all__:
    getattr(ng, name)
model = ng.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "mxfp8")
model(torch.ones(2, 64)).sum().backward()
q = ng.quantize(torch.ones(2, 32), "mxfp4")
said = {"codes": q.codes.flatten().tolist(), "gradient": bool(model[0].weight.grad.any())}
try:
    ng.run({"training": {"steps": 1}})
except ng.system.errors.UserError as error:
    said["run"] = str(error)
said["train"] = main(["train", "--steps", "1"])
said["prepare"] = main(["prepare", "stdlib", "--out", "corpus"])
print(json.dumps(said), flush=True)
said["formats"] = main(["formats", "e4m3"])
said["recipes"] = main(["recipes", "mxfp4"])
sys.exit(main(["doctor", "--json"]) if said["formats"] == said["recipes"] == 0 else 9)
"""


@pytest.mark.tier("thorough")
def test_the_library_and_the_doctor_work_and_a_run_is_refused(tmp_path):
    place = {"HF_HUB_OFFLINE": "1", "CXX": "true", "PYTHONPATH": str(Path(ng.__file__).parents[1])}
    line, place = [sys.executable, "-c", CHILD], {**os.environ, **place}
    ended = subprocess.run(line, check=False, capture_output=True, text=True, cwd=tmp_path, env=place)
    assert ended.returncode in (0, 1), ended.stderr
    said = json.loads(ended.stdout.splitlines()[0])
    assert said["codes"] == [6] * 64  # 1 is 4 (code 6) under a scale of 1/4
    assert said["gradient"]
    rest = "needs Linux or macOS: Windows lacks the file locks and signals by which a run survives a kill;"
    assert said["run"].startswith(f"a run {rest} use WSL 2")
    assert (said["train"], said["prepare"]) == (2, 2)
    for verb, line in zip(("train", "prepare"), ended.stderr.splitlines(), strict=True):
        assert line.startswith(f"narrowgauge: {verb} {rest}")
    assert list(tmp_path.iterdir()) == []
    assert "\nnot finite: " in ended.stdout  # of the format
    items = {item["item"]: item for item in json.loads(ended.stdout[ended.stdout.rindex("\n[\n") :])}
    assert items["system"]["status"] == "WARN"
    assert items["system"]["found"].startswith("Windows ")
    assert "WSL 2" in items["system"]["fix"]
    assert items["disk"]["status"] != "MISS"
