"""The doctor on this machine: its findings are compared with the system's tools."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.system.processes import Output, output_of
from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.cluster.doctor import gpus
from narrowgauge.trainer.cluster.doctor.gpus import joined
from narrowgauge.trainer.cluster.doctor.host import collect_disk
from narrowgauge.trainer.cluster.doctor.torch_setup.ask_torch import ask_torch, parse_report

ORDER = (
    "system python packages torch driver gpus recipes nccl launcher ranks cores open-files locked-memory "
    "shared-memory clock disk cache compiler network"
)


def said(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """{item: verdict} of this machine, as the command prints it, and its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        ended = subprocess.run(
            [sys.executable, "-m", "narrowgauge", "doctor", "--json"],
            check=False,
            capture_output=True,
            text=True,
            cwd=tmp_path_factory.mktemp("doctor"),
        )
    assert ended.stderr == ""
    items = json.loads(ended.stdout)
    assert all(list(item) == ["item", "status", "found", "fix"] for item in items)
    assert ended.returncode == any(item["status"] == "MISS" for item in items)
    return {item["item"]: item for item in items}


@pytest.mark.tier("thorough")
def test_every_item_once_and_in_order(here):
    assert " ".join(name for name in here if name not in ("peers", "gpu-jobs")) == ORDER
    assert {item["status"] for item in here.values()} <= {"OK", "WARN", "MISS"}


@pytest.mark.tier("thorough")
def test_software(here):
    assert platform.python_version().startswith(here["python"]["found"])
    assert here["torch"]["found"].startswith(version("torch"))
    assert here["system"]["found"].startswith(f"{platform.system()} {platform.machine()}, glibc ")
    assert " ".join(platform.libc_ver()) in here["system"]["found"]
    for name in ("jinja2", "numpy", "pydantic", "rich", "safetensors", "tokenizers"):
        assert f"{name} {version(name)}" in here["packages"]["found"]
    cxx = shutil.which("g++")
    if cxx and "CXX" not in os.environ:
        assert here["compiler"]["found"].startswith(said("g++", "--version").splitlines()[0])


def test_recipes_agree_with_the_verb(here, capsys):
    assert main(["recipes"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    native = {row[0] for row in rows if len(row) > 1 and row[1] == "native"}
    words = here["recipes"]["found"].partition("; ")[0].removeprefix("native: ")
    assert set(words.split(", ")) == native


def test_limits(here):
    soft = said("bash", "-c", "ulimit -n").strip()
    assert here["open-files"]["found"].replace(",", "") == soft
    assert (here["open-files"]["status"] == "OK") == (soft == "unlimited" or int(soft) >= 4096)
    locked = said("bash", "-c", "ulimit -l").strip()
    if locked != "unlimited":
        assert here["locked-memory"]["found"].startswith(f"{int(locked) / 1024:.1f} MiB")
    threads = os.environ.get("OMP_NUM_THREADS")
    assert (f"OMP_NUM_THREADS={threads}" in here["cores"]["found"]) == (threads is not None)
    assert int(here["cores"]["found"].split()[0]) <= len(os.sched_getaffinity(0))


def test_disks(here):
    size = int(said("df", "--output=size", "-B1", "/dev/shm").split()[-1])
    assert f"of {size / 2**30:.1f} GiB" in here["shared-memory"]["found"]
    folder = re.match(r"(.+) \(\S+\): ", here["disk"]["found"])[1]
    free, size, kind = said("df", "--output=avail,size,fstype", "-B1", folder).split()[-3:]
    assert f"({kind})" in here["disk"]["found"]
    told = float(re.search(r"([\d.]+) GiB free", here["disk"]["found"])[1])
    assert told == pytest.approx(int(free) / 2**30, rel=0.05, abs=1)
    assert f"of {int(size) / 2**30:.1f} GiB" in here["disk"]["found"]
    assert not list(Path(folder).iterdir())


def test_gpus(here):
    if not list(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
        assert here["driver"]["found"] == "no GPU, no driver"
        assert "gpu-jobs" not in here
    elif shutil.which("nvidia-smi"):
        query = said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        name, driver = query.splitlines()[0].split(", ")
        assert name in here["gpus"]["found"]
        assert driver in here["driver"]["found"]


@pytest.mark.tier("thorough")
def test_data_and_tokenizer_that_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "a.txt").write_text("the narrow gauge\n")
    (tmp_path / "tokenizer.json").write_text("{}")

    def verdicts(data, tokenizer):
        code = main(["doctor", "--json", "--data", str(data), "--tokenizer", str(tokenizer)])
        items = {item["item"]: item for item in json.loads(capsys.readouterr().out)}
        return code, *(list(items[name].values())[1:] for name in ("data", "tokenizer"))

    _, *good = verdicts(tmp_path / "a.txt", "bytes")
    assert good == [["OK", f"{tmp_path}/a.txt: text: 1 files", ""], ["OK", "bytes: needs no file", ""]]
    code, data, tokenizer = verdicts(tmp_path / "b.txt", tmp_path / "tokenizer.json")
    assert (code, data[0], tokenizer[0]) == (1, "MISS", "MISS")
    assert "does not exist" in data[1] + data[2]
    assert str(tmp_path / "tokenizer.json") in tokenizer[1]
    assert tokenizer[2]


def test_a_folder_that_cannot_be_written_to_or_is_not_there_yet(tmp_path):
    assert collect_disk(tmp_path / "not" / "yet").path == str(tmp_path)
    assert collect_disk(Path("/proc")).error
    disk = collect_disk(tmp_path)
    assert (disk.error, disk.kind != "") == ("", True)
    assert disk.speed > 0
    assert abs(disk.skew) < 1
    assert not list(tmp_path.iterdir())


def test_a_program_that_hangs_is_left():
    assert output_of(["sleep", "30"], 0.1).error == "no answer in 0 s"
    assert output_of(["no-such-program"], 1).code is None


def test_the_gpus_are_not_touched_by_this_process():
    report = ask_torch()
    assert report.software["version"] == torch.__version__
    assert len(report.gpus) == torch.cuda.device_count()
    assert not torch.cuda.is_initialized()


def test_what_torch_says_is_joined_with_what_the_driver_says():
    described = {"maker": "nvidia", "capability": [9, 0], "architecture": "", "memory": 80 << 30}
    cards = [
        described | {"name": "H100", "peers": [1], "uuid": "a", "used": 5},
        described | {"name": "H100", "peers": [0], "uuid": "b", "used": 6},
    ]
    software = {"version": "2.13.0+cu130", "cuda": "13.0"}
    told = {"software": software, "gpus": cards, "gpu_error": "", "asked": True}
    report = parse_report(Output(0, "a warning\nnarrowgauge-doctor:" + json.dumps(told)))
    assert (report.error, report.gpu_error, report.software) == ("", "", software)
    first, second = joined(report.gpus, {"GPU-a": {"used": 7, "busy": 50, "processes": (4711,)}})
    assert (first.used, first.busy, first.processes, first.peers) == (7, 50, (4711,), (1,))
    assert (second.used, second.busy, second.processes, second.capability) == (6, None, (), (9, 0))
    before = "narrowgauge-doctor:" + json.dumps(told | {"gpus": [], "asked": False})
    crashed = parse_report(Output(-11, before))  # the driver crashed it when torch asked for the GPUs
    assert (crashed.software, crashed.gpu_error) == (software, "its process was killed by SIGSEGV")
    assert parse_report(Output(-4)).error == "its process was killed by SIGILL"
    assert parse_report(Output(None, error="no answer in 120 s")).error == "no answer in 120 s"


class Nvml(SimpleNamespace):
    """The driver's library with three GPUs: two share NVLink, the third reports next to nothing."""

    NVMLError, nvmlMemory_v2, NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = RuntimeError, 2, 2, 0
    nvmlSystemGetDriverVersion = staticmethod(lambda: "570.86.10")
    nvmlSystemGetCudaDriverVersion_v2 = staticmethod(lambda: 12080)
    nvmlDeviceGetCount = staticmethod(lambda: 3)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: f"GPU-{index}")
    nvmlDeviceGetUUID = staticmethod(lambda gpu: gpu)
    nvmlDeviceGetP2PStatus = staticmethod(lambda a, b, index: 0 if b == "GPU-1" else 1)
    nvmlDeviceGetTopologyCommonAncestor = staticmethod(lambda a, b: 50 if a == "GPU-0" else 30)
    nvmlDeviceGetCudaComputeCapability = staticmethod(lambda gpu: (9, 0))

    def __getattr__(self, name):
        def told(gpu=None, *_):
            if gpu == "GPU-2" or name == "nvmlInit":
                raise RuntimeError("Not Supported")
            figures = SimpleNamespace(used=4 << 20, gpu=99, pid=9)
            return [figures] if "Processes" in name else figures

        return told


def test_what_the_driver_says(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    facts, uses = gpus._nvidia()
    links = ("NVLink", "PHB", "SYS")
    versions = {"driver": "570.86.10", "driver_cuda": (12, 8)}
    assert facts == versions | {"capabilities": ((9, 0),) * 3, "links": links}
    assert uses["GPU-1"] == {"used": 4 << 20, "busy": 99, "processes": (9,)}
    assert uses["GPU-2"] == {"used": None, "busy": None, "processes": ()}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # it is not installed
    assert gpus._nvidia() == ({}, {})
