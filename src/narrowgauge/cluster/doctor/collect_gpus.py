"""Which GPUs are there? Asked of the kernel, of the driver and of torch, who need not agree.

Torch is asked in a process of its own: a broken driver may hang or crash it, and the doctor's own use of
the GPU is over when it looks at who else uses it.
"""

import ctypes
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from narrowgauge.cluster.doctor.commands import answer_of
from narrowgauge.cluster.doctor.facts import Gpu, Hardware

_TORCH_SECONDS, _TOOL_SECONDS = 90.0, 15.0
_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
_INTEGRATED = 4 << 30  # bytes of its own memory below which an AMD GPU is part of the processor
_ASK = "from narrowgauge.cluster.doctor.collect_gpus import answer; answer()"
_MARK = "narrowgauge-doctor:"


def collect_hardware(build: str) -> Hardware:
    """The GPUs of this machine; `build` is what torch was built for."""
    makers = ("nvidia",) * _nvidia_gpus() + ("amd",) * _amd_gpus()
    newest = _driver_cuda()
    gpus: tuple[Gpu, ...] = ()
    error, driver, links = "", _text("/sys/module/amdgpu/version") if "amd" in makers else "", ""
    use: list[tuple[str, int | None, int | None]] = []
    processes: dict[str, list[tuple[int, int | None]]] = {}
    if "nvidia" in makers:
        driver = _nvidia_driver()
        use = parse_use(_smi("--query-gpu=uuid,memory.used,utilization.gpu"))
        processes = parse_processes(_smi("--query-compute-apps=gpu_uuid,pid,used_memory"))
        links = answer_of(["nvidia-smi", "topo", "-m"], _TOOL_SECONDS).out
    if build != "cpu" and (makers or newest):
        gpus, error = torch_gpus(use, processes)
    makers = makers or tuple(gpu.maker for gpu in gpus)
    return Hardware(
        makers=makers,
        on_bus=_on_bus(),
        driver=driver,
        driver_cuda=newest,
        gpus=gpus,
        error=error,
        links=parse_links(links) if len(gpus) == len(makers) else (),  # torch numbers what it sees
        fabric=any(Path("/sys/class/infiniband").glob("*")),
    )


def _nvidia_gpus() -> int:
    """NVIDIA GPUs with a device file; Windows' subsystem for Linux has one file for all of them."""
    files = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if files or not Path("/dev/dxg").exists():
        return files
    return len(parse_use(_smi("--query-gpu=uuid,memory.used,utilization.gpu")))


def _nvidia_driver() -> str:
    """Version of NVIDIA's driver, from the kernel or else from its tool."""
    kernel = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", _text("/proc/driver/nvidia/version"))
    return kernel[1] if kernel else _smi("--query-gpu=driver_version").partition("\n")[0].strip()


def _on_bus() -> tuple[str, ...]:
    """The maker of each GPU on the PCI bus."""
    makers = []
    for device in Path("/sys/bus/pci/devices").glob("*"):
        maker = _VENDORS.get(_text(device / "vendor"))
        if maker and _text(device / "class").startswith(_GPU_CLASSES):
            makers.append(maker)
    return tuple(sorted(makers))


def _amd_gpus() -> int:
    """AMD GPUs with memory of their own that ROCm's driver knows."""
    if not Path("/dev/kfd").exists():
        return 0
    count = 0
    for node in Path("/sys/class/kfd/kfd/topology/nodes").glob("*"):
        sizes = re.findall(r"^size_in_bytes (\d+)$", _banks(node), re.MULTILINE)
        is_gpu = re.search(r"^simd_count [1-9]", _text(node / "properties"), re.MULTILINE)
        count += bool(is_gpu and sum(map(int, sizes)) >= _INTEGRATED)
    return count


def _banks(node: Path) -> str:
    return "\n".join(_text(bank) for bank in node.glob("mem_banks/*/properties"))


def _driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the NVIDIA driver knows, from the driver's own library."""
    try:
        library, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def _smi(query: str) -> str:
    """The answer of nvidia-smi as comma-separated values."""
    return answer_of(["nvidia-smi", query, "--format=csv,noheader,nounits"], _TOOL_SECONDS).out


def _rows(text: str, columns: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == columns and row[0].startswith("GPU-")]


def _integer(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def parse_use(text: str) -> list[tuple[str, int | None, int | None]]:
    """(id, bytes in use, percent busy) of each GPU, from nvidia-smi's lines `uuid, MiB, percent`."""
    return [
        (uuid, None if (used := _integer(mib)) is None else used << 20, _integer(busy))
        for uuid, mib, busy in _rows(text, 3)
    ]


def parse_processes(text: str) -> dict[str, list[tuple[int, int | None]]]:
    """[(process, bytes)] by GPU id, from nvidia-smi's lines `uuid, pid, MiB`."""
    processes: dict[str, list[tuple[int, int | None]]] = {}
    for uuid, pid, mib in _rows(text, 3):
        used = _integer(mib)
        processes.setdefault(uuid, []).append((int(pid), None if used is None else used << 20))
    return processes


def parse_links(text: str) -> tuple[tuple[int, int, str], ...]:
    """(GPU, GPU, kind of connection) of each pair, from the matrix that `nvidia-smi topo -m` prints."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    links = []
    for words in lines:
        if len(words) > 1 and re.fullmatch(r"GPU\d+", words[0]) and not words[1].startswith("GPU"):
            row = int(words[0][3:])
            links += [(row, column, kind) for column, kind in enumerate(words[1 : row + 1])]
    return tuple((b, a, kind) for a, b, kind in links)


def torch_gpus(
    use: Sequence[tuple[str, int | None, int | None]],
    processes: dict[str, list[tuple[int, int | None]]],
) -> tuple[tuple[Gpu, ...], str]:
    """(the GPUs that torch sees, or none and what it said)."""
    said = answer_of([sys.executable, "-c", _ASK], _TORCH_SECONDS)
    lines = [line for line in said.out.splitlines() if line.startswith(_MARK)]
    if not lines:
        last = (said.error.strip().splitlines() or ["it ended without an answer"])[-1]
        return (), last[:300]
    answered = json.loads(lines[-1].removeprefix(_MARK))
    by_id = {uuid: (used, busy) for uuid, used, busy in use}
    gpus = []
    for facts in answered["gpus"]:
        uuid = f"GPU-{facts.pop('uuid')}"
        used, busy = by_id.get(uuid, (facts.pop("used_by_all"), None))
        facts.pop("used_by_all", None)
        gpu = Gpu(**facts | {"capability": tuple(facts["capability"]), "peers": tuple(facts["peers"])})
        gpus.append(replace(gpu, used=used, busy=busy, processes=tuple(processes.get(uuid, ()))))
    return tuple(gpus), answered["error"]


def answer() -> None:
    """Print what torch knows of its GPUs, as JSON; run in a process of its own."""
    gpus: list[dict[str, Any]] = []
    error = ""
    try:
        torch.cuda.init()
        gpus = [_describe(index) for index in range(torch.cuda.device_count())]
    except Exception as problem:  # whatever a broken installation raises is the answer
        error = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
    print(_MARK + json.dumps({"gpus": gpus, "error": error}))


def _describe(index: int) -> dict[str, Any]:
    others = (other for other in range(torch.cuda.device_count()) if other != index)
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    is_amd = bool(torch.version.hip)
    return {
        "name": properties.name,
        "maker": "amd" if is_amd else "nvidia",
        "capability": (0, 0) if is_amd else torch.cuda.get_device_capability(index),
        "architecture": properties.gcnArchName.partition(":")[0] if is_amd else "",
        "memory": properties.total_memory,
        "peers": [other for other in others if torch.cuda.can_device_access_peer(index, other)],
        "uuid": str(getattr(properties, "uuid", "")),
        "used_by_all": total - free,
    }


def _text(path: str | Path) -> str:
    """What is in a small file of the kernel; "" if it is not there."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
