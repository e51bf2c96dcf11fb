"""Reads which GPUs there are, from the kernel, the driver and torch (`ask_torch`), who need not agree."""

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowgauge.cluster.doctor.facts import LIMITS, Gpu, Hardware, Version, release
from narrowgauge.cluster.doctor.torch_setup.ask_torch import TorchReport
from narrowgauge.processes import output_of

Use = Mapping[str, tuple[int | None, int | None]]  # (bytes in use, percent busy) by GPU id
_TOOL_SECONDS = 15.0
_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
_USE = "--query-gpu=uuid,memory.used,utilization.gpu"


def collect_hardware(torch: TorchReport) -> Hardware:
    """The GPUs of this machine, with those of torch's report."""
    makers = ("nvidia",) * _nvidia_gpus() + ("amd",) * _amd_gpus()
    newest, is_nvidia = _driver_cuda(), "nvidia" in makers
    driver = _nvidia_driver() if is_nvidia else _text("/sys/module/amdgpu/version") if makers else ""
    use = parse_use(_smi(_USE)) if is_nvidia else {}
    processes = parse_processes(_smi("--query-compute-apps=gpu_uuid,pid")) if is_nvidia else {}
    links = parse_links(output_of(["nvidia-smi", "topo", "-m"], _TOOL_SECONDS).out) if is_nvidia else ()
    gpus = joined(torch.gpus, use, processes)
    makers = makers or tuple(gpu.maker for gpu in gpus)
    return Hardware(
        makers=makers,
        on_bus=_on_bus(),
        driver=driver,
        driver_cuda=newest,
        capabilities=parse_capabilities(_smi("--query-gpu=compute_cap")) if is_nvidia else (),
        gpus=gpus,
        error=torch.gpu_error,
        links=links if len(gpus) == len(makers) else (),  # those between others that torch does not see
        fabric=any(Path("/sys/class/infiniband").glob("*")),
    )


def _nvidia_gpus() -> int:
    """NVIDIA GPUs with a device file; Windows' subsystem for Linux has one file for all of them."""
    files = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if files or not Path("/dev/dxg").exists():
        return files
    return len(parse_use(_smi(_USE)))


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
        banks = "\n".join(_text(bank) for bank in node.glob("mem_banks/*/properties"))
        sizes = re.findall(r"^size_in_bytes (\d+)$", banks, re.MULTILINE)
        is_gpu = re.search(r"^simd_count [1-9]", _text(node / "properties"), re.MULTILINE)
        count += bool(is_gpu and sum(map(int, sizes)) >= LIMITS["gpu"]["integrated"])
    return count


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
    return output_of(["nvidia-smi", query, "--format=csv,noheader,nounits"], _TOOL_SECONDS).out


def _rows(text: str, columns: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == columns and row[0].startswith("GPU-")]


def parse_use(text: str) -> Use:
    """(bytes in use, percent busy) by GPU id, from nvidia-smi's lines `uuid, MiB, percent`."""
    return {
        uuid: (int(mib) << 20 if mib.isdecimal() else None, int(busy) if busy.isdecimal() else None)
        for uuid, mib, busy in _rows(text, 3)
    }


def parse_processes(text: str) -> dict[str, tuple[int, ...]]:
    """The processes by GPU id, from nvidia-smi's lines `uuid, pid`."""
    rows = _rows(text, 2)
    return {uuid: tuple(int(pid) for other, pid in rows if other == uuid) for uuid, _ in rows}


def parse_capabilities(text: str) -> tuple[Version, ...]:
    """The compute capabilities in nvidia-smi's lines `8.9`; drivers before 510 do not know the question."""
    return tuple(release(line) for line in text.splitlines() if re.fullmatch(r"\d+\.\d+", line.strip()))


def parse_links(text: str) -> tuple[str, ...]:
    """The kinds of connection between two GPUs, from the matrix that `nvidia-smi topo -m` prints."""
    kinds: set[str] = set()
    for line in text.splitlines():
        words = re.sub(r"\x1b\[[0-9;]*m", "", line).split()
        if len(words) > 1 and re.fullmatch(r"GPU\d+", words[0]) and not words[1].startswith("GPU"):
            kinds.update(words[1 : 1 + int(words[0][3:])])  # left of the diagonal: each pair once
    return tuple(sorted(kinds))


def joined(
    gpus: Sequence[Mapping[str, Any]], use: Use, processes: Mapping[str, tuple[int, ...]]
) -> tuple[Gpu, ...]:
    """The GPUs that torch described (`ask_torch`), with the driver's figures."""
    found = []
    for described in gpus:
        facts = dict(described)
        uuid = f"GPU-{facts.pop('uuid')}"
        facts["capability"], facts["peers"] = tuple(facts["capability"]), tuple(facts["peers"])
        facts["used"], facts["busy"] = use.get(uuid, (facts["used"], None))
        found.append(Gpu(**facts, processes=processes.get(uuid, ())))
    return tuple(found)


def _text(path: str | Path) -> str:
    """The text of a small file of the kernel; "" if there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
