"""The GPUs that the kernel, the driver and torch see, their native recipes and their other users.

Machine code for sm_XY runs on a GPU of capability X.Z with Z >= Y; PTX, called compute_XY, on every later GPU
("CUDA C++ Programming Guide", binary and PTX compatibility).
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

from narrowgauge.recipes import choose_backend, recipe, recipe_names
from narrowgauge.system.devices import Device
from narrowgauge.system.processes import in_time
from narrowgauge.system.units import human_bytes
from narrowgauge.trainer.cluster.doctor.facts import (
    LIMITS,
    Facts,
    Gpu,
    Verdict,
    count,
    dotted,
    miss,
    ok,
    text_of,
    warn,
)
from narrowgauge.trainer.cluster.doctor.torch_setup import right_build

Uses = Mapping[str, Mapping[str, Any]]  # `used`, `busy` and `processes` by GPU id
_DRIVER_SECONDS = 15.0
_LINKS = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # by nvmlGpuTopologyLevel_t
_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")


def read_gpus(torch: Mapping[str, Any]) -> dict[str, Any]:
    """The GPUs of this machine: those with a device file, those of NVIDIA's driver, and torch's."""
    nothing: tuple[dict[str, Any], Uses] = {}, {}
    nvidia, uses = in_time(_nvidia, _DRIVER_SECONDS, nothing)
    files = len(list(Path("/dev").glob("nvidia[0-9]*")))  # WSL has none, but the driver answers
    makers = ("nvidia",) * (files or len(uses)) + ("amd",) * _amd_gpus()
    gpus = joined(torch.get("gpus", ()), uses)
    facts: dict[str, Any] = nvidia or {"driver": text_of("/sys/module/amdgpu/version")}
    if len(gpus) != len(uses):  # links may belong to GPUs that torch does not see
        facts.pop("links", None)
    return facts | {
        "makers": makers or tuple(gpu.maker for gpu in gpus),
        "on_bus": _on_bus(),
        "gpus": gpus,
        "gpu_error": torch.get("gpu_error", ""),
        "fabric": any(Path("/sys/class/infiniband").glob("*")),
    }


def _nvidia() -> tuple[dict[str, Any], Uses]:
    """Facts of the driver, and fields of `Gpu` by the GPU's id, from NVIDIA; empty if there is none."""
    try:
        nvml = import_module("pynvml")  # here: the doctor also works where packages are missing
    except ImportError:
        return {}, {}

    def told(what: str, *arguments: Any) -> Any:
        with suppress(nvml.NVMLError):  # this driver or GPU does not report it
            return getattr(nvml, what)(*arguments)
        return None

    told("nvmlInit")
    indices = range(told("nvmlDeviceGetCount") or 0)
    gpus = list(filter(None, (told("nvmlDeviceGetHandleByIndex", index) for index in indices)))
    uses: dict[str, dict[str, Any]] = {}
    for gpu in gpus:
        memory = told("nvmlDeviceGetMemoryInfo", gpu, nvml.nvmlMemory_v2)
        rates = told("nvmlDeviceGetUtilizationRates", gpu)
        processes = told("nvmlDeviceGetComputeRunningProcesses", gpu) or ()
        uses[told("nvmlDeviceGetUUID", gpu)] = {
            "used": memory and memory.used,
            "busy": rates and rates.gpu,
            "processes": tuple(process.pid for process in processes),
        }

    def link(a: Any, b: Any) -> str:
        """The kind of connection, as `nvidia-smi topo -m` names it."""
        if told("nvmlDeviceGetP2PStatus", a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return "NVLink"
        return _LINKS.get(told("nvmlDeviceGetTopologyCommonAncestor", a, b), "")

    if not gpus:
        return {}, {}
    cuda = told("nvmlSystemGetCudaDriverVersion_v2")  # of libcuda.so.1: none where that does not load
    capabilities = [told("nvmlDeviceGetCudaComputeCapability", gpu) for gpu in gpus]
    return {
        "driver": told("nvmlSystemGetDriverVersion") or "",
        "driver_cuda": cuda and (cuda // 1000, cuda % 1000 // 10),
        "capabilities": tuple(filter(None, capabilities)),
        "links": tuple(sorted({link(a, b) for a, b in combinations(gpus, 2)} - {""})),
    }, uses


def _on_bus() -> tuple[str, ...]:
    """The maker of each GPU on the PCI bus."""
    devices = Path("/sys/bus/pci/devices").glob("*")
    gpus = (device for device in devices if text_of(device / "class").startswith(_GPU_CLASSES))
    makers = (_VENDORS.get(text_of(device / "vendor"), "") for device in gpus)
    return tuple(sorted(filter(None, makers)))


def _amd_gpus() -> int:
    """The number of AMD GPUs with dedicated memory that ROCm's driver knows."""
    if not Path("/dev/kfd").exists():
        return 0
    count = 0
    for node in Path("/sys/class/kfd/kfd/topology/nodes").glob("*"):
        banks = "\n".join(text_of(bank) for bank in node.glob("mem_banks/*/properties"))
        sizes = re.findall(r"^size_in_bytes (\d+)$", banks, re.MULTILINE)
        is_gpu = re.search(r"^simd_count [1-9]", text_of(node / "properties"), re.MULTILINE)
        count += bool(is_gpu and sum(map(int, sizes)) >= LIMITS["gpu"]["integrated"])
    return count


def joined(gpus: Sequence[Mapping[str, Any]], uses: Uses) -> tuple[Gpu, ...]:
    """The GPUs that torch described (`ask_torch`), completed with the driver's figures."""
    found = []
    for facts in gpus:
        lists = {name: tuple(facts[name]) for name in ("capability", "peers")}
        known = {**facts, **lists, **uses.get(f"GPU-{facts['uuid']}", {})}
        found.append(Gpu(**{name: value for name, value in known.items() if name != "uuid"}))
    return tuple(found)


def gpus(facts: Facts) -> Verdict:
    """The verdict on the GPUs that torch sees, and whether it has code for them."""
    if not facts.gpus:
        return _no_gpu(facts)
    alike = Counter(f"{gpu.name}, {human_bytes(gpu.memory)}, {_kind(gpu)}" for gpu in facts.gpus)
    found = "; ".join(f"{number} x {name}" for name, number in alike.items())
    without = [_kind(gpu) for gpu in facts.gpus if not _has_code(facts.architectures, gpu)]
    if without:
        fix = f"install a torch built for {without[0]} if there is one, or train on the CPU (--device cpu)"
        if facts.gpus[0].maker == "nvidia" and (build := right_build(facts, "nvidia")):
            fix = f"install {build}, which has code for {without[0]}"
        return miss(f"{found}; this torch has code for {', '.join(facts.architectures)} only", fix)
    if len(set(map(_kind, facts.gpus))) > 1:
        return warn(
            found,
            "choose GPUs of one kind with CUDA_VISIBLE_DEVICES: together they go at the slowest one's pace, "
            "and a recipe may be native on some and emulated on others",
        )
    return ok(found)


def _kind(gpu: Gpu) -> str:
    """The property that determines which code a GPU runs, in words."""
    return f"compute capability {dotted(gpu.capability)}" if gpu.maker == "nvidia" else gpu.architecture


def _no_gpu(facts: Facts) -> Verdict:
    if not facts.makers and "nvidia" in facts.on_bus:
        there = count(facts.on_bus.count("nvidia"), "NVIDIA GPU")
        return warn(
            f"{there} on the bus, and no device file for it here",
            "install NVIDIA's driver; start a container with the GPUs (docker run --gpus all), and a Slurm "
            "job (--gpus)",
        )
    if not facts.makers:
        return ok("none; training runs on the CPU")
    kinds = ", ".join(f"compute capability {dotted(one)}" for one in dict.fromkeys(facts.capabilities))
    there = f"{count(len(facts.makers), 'GPU')} in the machine{f' ({kinds})' if kinds else ''}"
    there += ", none that torch sees"
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        value = facts.environment.get(name)
        if value is not None and (not value.strip() or value.strip().startswith("-")):
            return warn(f"{there}: {name}={value!r} hides them", f"unset {name}, or name GPUs in it")
    if facts.torch_error or facts.build == "cpu":
        why = "it does not import" if facts.torch_error else "it is a build for CPUs"
        return miss(f"{there}: {why}", "fix torch first (see above)")
    said = f" ({facts.gpu_error})" if facts.gpu_error else ""
    return miss(
        f"{there}{said}",
        "fix torch and the driver first; if both are right, see that this user may open the device files "
        "(/dev/nvidia*, or /dev/kfd and /dev/dri: group render) and that nothing crashed (dmesg)",
    )


def _has_code(architectures: Sequence[str], gpu: Gpu) -> bool:
    """Whether a build of torch for these architectures has code that the GPU can run."""
    if not architectures:
        return True
    if gpu.maker == "amd":
        return gpu.architecture in architectures
    for name in architectures:
        if found := re.fullmatch(r"(compute|sm)_(\d+)(\d)[af]*", name):  # sm_90a: for one generation only
            version = int(found[2]), int(found[3])
            is_alike = found[1] == "compute" or version[0] == gpu.capability[0]
            if is_alike and version <= gpu.capability:
                return True
    return False


def nccl(facts: Facts) -> Verdict | None:
    """The verdict on the library through which processes talk; None without a torch that can be imported."""
    if not facts.torch_works:
        return None
    gpus, built = facts.gpus, ", ".join(facts.backends) or "none"
    if not gpus:
        if "gloo" in facts.backends:
            return ok(f"not needed: processes on CPUs talk through gloo (built in: {built})")
        return warn("this torch cannot connect processes", "install a torch built with gloo")
    name = "RCCL" if gpus[0].maker == "amd" else "NCCL"
    if "nccl" not in facts.backends:
        status = miss if len(gpus) > 1 else warn
        return status(f"none (built in: {built})", f"install a torch built with {name}, or use one GPU only")
    found = f"{name} {dotted(facts.nccl)}"
    if name == "RCCL":
        return ok(f"{found}; FP8 sums between GPUs: not known of RCCL")
    needed, capability = LIMITS["version"]["nccl_fp8"], LIMITS["version"]["fp8_capability"]
    if min(gpu.capability for gpu in gpus) < capability:
        between = f"between these GPUs, which takes compute capability {dotted(capability)}"
        return ok(f"{found}; no FP8 sums {between}")
    if facts.nccl[:2] < needed:
        return warn(
            f"{found}; no FP8 sums",
            f"install a torch with NCCL {dotted(needed)} or later, to add FP8 gradients on the wire",
        )
    return ok(f"{found}, with FP8 sums between GPUs")


def peers(facts: Facts) -> Verdict | None:
    """The verdict on pairs of GPUs, if there are any."""
    gpus = facts.gpus
    if len(gpus) < 2:
        return None
    links = f" over {', '.join(facts.links)}" if facts.links else ""
    pairs = list(combinations(range(len(gpus)), 2))
    apart = [(a, b) for a, b in pairs if b not in gpus[a].peers or a not in gpus[b].peers]
    if not apart:
        return ok(f"each GPU reaches the memory of each other{links}")
    found = f"{len(apart)} of {len(pairs)} pairs of GPUs, such as {apart[0][0]} and {apart[0][1]}"
    return warn(
        f"{found}, reach each other only through the host's memory{links}",
        "measure before you use several (narrowgauge scaling); consumer cards have no peer access, on others "
        "switch off PCIe ACS and the IOMMU",
    )


def jobs(facts: Facts) -> Verdict | None:
    """The verdict on other users of the GPUs, if there are GPUs."""
    taken = []
    for index, gpu in enumerate(facts.gpus):
        if gpu.processes or (gpu.used or 0) > LIMITS["gpu"]["foreign"]:
            by = f" by process {', '.join(map(str, gpu.processes))}" if gpu.processes else ""
            busy = f", {gpu.busy} % busy" if gpu.busy else ""
            taken.append(f"GPU {index}: {human_bytes(gpu.used or 0)} in use{by}{busy}")
    if taken:
        return warn(
            "; ".join(taken),
            "wait for them, stop them if they are yours, or choose other GPUs with CUDA_VISIBLE_DEVICES",
        )
    if not facts.gpus:
        return None
    is_known = any(gpu.used is not None for gpu in facts.gpus)
    return ok("no other work on the GPUs" if is_known else "unknown: the driver does not report it")


def recipes(facts: Facts) -> Verdict | None:
    """The recipes that are native on all GPUs, and those that a newer CUDA would make native.

    None without a torch that can be imported.
    """
    if not facts.torch_works:
        return None
    kinds = dict.fromkeys(
        Device(
            maker=gpu.maker, capability=gpu.capability, architecture=gpu.architecture, library=facts.library
        )
        for gpu in facts.gpus
    )
    devices = list(kinds) or [Device(maker="cpu")]
    native = [name for name in recipe_names() if all(_is_native(name, device) for device in devices)]
    emulated = [name for name in recipe_names() if name not in native]
    found = f"native: {', '.join(native)}; emulated: {', '.join(emulated) or 'none'}"
    latest = [replace(device, library=(99, 0)) for device in devices]
    gained = [name for name in emulated if all(_is_native(name, device) for device in latest)]
    if gained:
        device = next(d for d in devices if not _is_native(gained[0], d))
        reason = choose_backend(recipe(gained[0]), device).reason.partition(";")[0]
        fix = f"install a torch of a newer CUDA to run {', '.join(gained)} natively: {reason}"
        return warn(found, fix)
    return ok(found)


def _is_native(name: str, device: Device) -> bool:
    return choose_backend(recipe(name), device).name == "native"
