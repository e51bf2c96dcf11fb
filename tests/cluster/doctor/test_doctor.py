"""The doctor on this machine: its findings are compared with the system's tools."""

import json
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from narrowgauge.system.processes import Output, output_of
from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.cluster.doctor.read import joined, nvidia_driver, read_disk
from narrowgauge.trainer.cluster.doctor.torch_setup import parse_report

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


def test_what_is_found_is_what_the_systems_tools_say(here, capsys):
    """Every item once and in order; software, limits, disks and GPUs."""
    assert " ".join(name for name in here if name not in ("peers", "gpu-jobs")) == ORDER
    found = {name: item["found"] for name, item in here.items()}
    assert found["torch"].startswith(version("torch"))
    assert f"{platform.machine()}, {' '.join(platform.libc_ver())}" in found["system"]
    assert f"pydantic {version('pydantic')}" in found["packages"]
    assert main(["recipes"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    native = {row[0] for row in rows if len(row) > 1 and row[1] == "native"}
    assert set(found["recipes"].partition("; ")[0].removeprefix("native: ").split(", ")) == native
    assert found["open-files"].replace(",", "") == said("bash", "-c", "ulimit -n").strip()
    assert int(found["cores"].split()[0]) <= len(os.sched_getaffinity(0))
    size = int(said("df", "--output=size", "-B1", "/dev/shm").split()[-1])
    assert f"of {size / 2**30:.1f} GiB" in found["shared-memory"]
    folder = re.match(r"(.+) \(\S+\): ", found["disk"])[1]
    size, kind = said("df", "--output=size,fstype", "-B1", folder).split()[-2:]
    assert f"({kind})" in found["disk"]
    assert f"of {int(size) / 2**30:.1f} GiB" in found["disk"]
    assert not list(Path(folder).iterdir())
    if not list(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
        assert found["driver"] == "no GPU, no driver"
        assert "gpu-jobs" not in here


@pytest.mark.tier("thorough")
def test_data_and_tokenizer_that_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "a.txt").write_text("the narrow gauge\n")
    found = []
    for data, tokenizer in (("a.txt", "bytes"), ("b.txt", f"{tmp_path}/tokenizer.json")):
        code = main(["doctor", "--json", "--data", str(tmp_path / data), "--tokenizer", tokenizer])
        items = {item["item"]: item for item in json.loads(capsys.readouterr().out)}
        found += [tuple(items[name].values())[1:] for name in ("data", "tokenizer")]
    assert found[:2] == [("OK", f"{tmp_path}/a.txt: text: 1 files", ""), ("OK", "bytes: needs no file", "")]
    assert (code, found[2][0], found[3][0]) == (1, "MISS", "MISS")
    assert "does not exist" in " ".join(found[2])
    assert str(tmp_path / "tokenizer.json") in found[3][1]


def test_a_folder_that_cannot_be_written_to_or_is_not_there_yet(tmp_path):
    assert read_disk(Path("/proc")).error
    disk = read_disk(tmp_path / "not" / "yet")
    assert (disk.path, disk.error, disk.kind != "") == (str(tmp_path), "", True)
    assert disk.speed > 0
    assert abs(disk.skew) < 1
    assert not list(tmp_path.iterdir())


def test_a_program_that_hangs_is_left():
    assert output_of(["sleep", "30"], 0.1).error == "no answer in 0 s"
    assert output_of(["no-such-program"], 1).code is None


def test_what_torch_says_is_joined_with_what_the_driver_says():
    card = {"name": "H100", "capability": (9, 0), "peers": (1,), "uuid": "a", "used": 5}
    told = {"torch": "2.13.0+cu130", "gpus": [card]}
    report = parse_report(Output(0, f"a warning\nnarrowgauge-doctor:{told}"))
    (found,) = joined(report["gpus"], {"GPU-a": {"used": 7, "busy": 50, "processes": (4711,)}})
    assert (found.used, found.busy, found.processes, found.peers) == (7, 50, (4711,), (1,))
    before = {"torch": "2.13.0+cu130", "asked": False}
    crashed = parse_report(Output(-11, f"narrowgauge-doctor:{before}"))  # while torch asked for the GPUs
    assert crashed == {"torch": "2.13.0+cu130", "gpu_error": "its process was killed by SIGSEGV"}
    late = parse_report(Output(None, error="no answer in 120 s"))
    assert late == {"torch_error": "no answer in 120 s"}


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
    facts, uses = nvidia_driver()
    links = ("NVLink", "PHB", "SYS")
    versions = {"driver": "570.86.10", "driver_cuda": (12, 8)}
    assert facts == versions | {"capabilities": ((9, 0),) * 3, "links": links}
    assert uses["GPU-1"] == {"used": 4 << 20, "busy": 99, "processes": (9,)}
    assert uses["GPU-2"] == {"used": None, "busy": None, "processes": ()}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # it is not installed
    assert nvidia_driver() == ({}, {})
