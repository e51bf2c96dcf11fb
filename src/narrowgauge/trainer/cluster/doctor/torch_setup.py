"""Torch on this machine: what it reports, and why it does not import.

A torch that does not fit the machine may do worse than raise: it may crash the process that imports it, or
hang on a broken driver. So the doctor never imports it, and asks it in a separate process. Its use of a GPU
has also ended by the time the doctor looks for other users of the GPUs.

The texts of errors come from glibc's loader (`version ... not found`, `cannot open shared object file`,
`undefined symbol`), of the loaders of macOS and Windows, and of Python's import system.
"""

import re
import sys
from ast import literal_eval
from signal import Signals
from typing import Any

from narrowgauge.system.processes import Output, output_of
from narrowgauge.trainer.cluster.doctor.facts import release

_SECONDS = 120.0
_ASK = "from narrowgauge.trainer.cluster.doctor.torch_setup import answer; answer()"
_MARK = "narrowgauge-doctor:"
_REINSTALL = (
    "in a new environment, install torch with its dependencies (python -m pip install torch, no --no-deps)"
)
UNKNOWN = "narrowgauge does not know this torch"  # begins the error for a torch that imports but does not fit
#: What to do about an error of `import torch` that matches; the first match applies.
_FIXES = {
    UNKNOWN: "install torch 2.13, with which this version of narrowgauge was tested",
    r"version .GLIBC_([\d.]+)' not found": (
        r"it was built for glibc \1 or later: use a newer Linux (for torch 2.11 and later RHEL 8, Debian 10, "
        r"Ubuntu 20.04 or later), or a container of one (Apptainer, Docker)"
    ),
    r"version .(?:GLIBCXX|CXXABI)_[\d.]+' not found": (
        "an older libstdc++ is found first: unset LD_LIBRARY_PATH, or load a newer GCC (module load gcc; "
        "conda install -c conda-forge libstdcxx-ng)"
    ),
    r"undefined symbol: nccl|libnccl.*undefined symbol": (
        "another NCCL is found first: unset LD_LIBRARY_PATH and LD_PRELOAD, or reinstall torch's own"
    ),
    r"undefined symbol|symbol not found": (
        "torch and a library that it loads are of different versions: unset LD_LIBRARY_PATH and "
        f"LD_PRELOAD; else, {_REINSTALL}"
    ),
    r"libcuda\.so\.1: cannot open": (
        "install NVIDIA's driver, start the container with the GPUs (docker run --gpus all), or install "
        "the build for CPUs"
    ),
    r"lib(?:cu(?!rl)|nv|nccl)[\w.-]*\.so[\d.]*: cannot open": (
        f"a CUDA library that torch's wheel depends on as a separate package is missing: {_REINSTALL}; a "
        "torch of a cluster's module wants that module loaded (module load cuda)"
    ),
    r"lib(?:amd|hip|roc|hsa|MIOpen|rccl)[\w.-]*\.so[\d.]*: cannot open": (
        "load the ROCm that it was built for (module load rocm), or install the build for this machine"
    ),
    r"(lib[\w+.-]*\.so[\d.]*): cannot open": (
        r"install \1 with the system's packages or load its module, or " + _REINSTALL
    ),
    r"SIGILL": (
        "this CPU, or the one that a virtual machine shows, lacks an instruction that torch was built with: "
        "choose a machine with AVX2, or build torch from its source here"
    ),
    r"killed by SIG": (
        f"a library crashed while it was loaded: unset LD_PRELOAD and LD_LIBRARY_PATH; else, {_REINSTALL}"
    ),
    r"no answer in": (
        "the file system that Python's packages are on is slow or away: copy the environment to a local disk"
    ),
    r"WinError|DLL load failed": f"install Microsoft's Visual C++ Redistributable; else, {_REINSTALL}",
    r"incompatible architecture|wrong ELF class|mach-o": f"this build is for another processor: {_REINSTALL}",
    r"torch\._C|PyTorch C extensions|partially initialized|cannot import name|has no attribute": (
        "a folder or file named torch may hide it: start in another folder, look at PYTHONPATH; else, "
        + _REINSTALL
    ),
}


def ask_torch() -> dict[str, Any]:
    """What torch reports about itself and the GPUs it sees, as `Facts`, if only `torch_error`.

    A process imports it; a CPU build that is already imported is queried directly. `gpus` are the fields of
    `Gpu` for each.
    """
    torch = sys.modules.get("torch")
    if torch is not None and not (torch.version.cuda or torch.version.hip):
        return _software(torch)
    return parse_report(output_of([sys.executable, "-c", _ASK], _SECONDS))


def parse_report(output: Output) -> dict[str, Any]:
    """The report in the line that `answer` prints, or why that line is missing."""
    lines = [line for line in output.out.splitlines() if line.startswith(_MARK)]
    if not lines:
        return {"torch_error": _end_of(output)}
    report: dict[str, Any] = literal_eval(lines[-1].removeprefix(_MARK))
    return report if report.pop("asked", True) else report | {"gpu_error": _end_of(output)}


def _end_of(output: Output) -> str:
    """How a process ended that printed no report."""
    if output.code is not None and output.code < 0:
        return f"its process was killed by {Signals(-output.code).name}"
    lines = output.error.strip().splitlines()
    return lines[-1][:300] if lines else "its process ended without an answer"


def answer() -> None:
    """Print torch's facts, then the GPUs it sees; lines already printed survive a crash."""
    why = ""
    try:
        import torch  # here: the doctor imports this file, and never torch

        why = f"{UNKNOWN}: "
        report = _software(torch)
    except Exception as error:  # anything that a broken installation raises is a result
        print(f"{_MARK}{ {'torch_error': why + words_of_import(error)}!r}")
        return
    print(f"{_MARK}{report | {'asked': False}}", flush=True)
    try:
        if report["build"] != "cpu":
            torch.cuda.init()
            report["gpus"] = [_gpu(torch, index) for index in range(torch.cuda.device_count())]
    except Exception as error:
        report["gpu_error"] = words_of_import(error)
    print(f"{_MARK}{report}", flush=True)


def _software(torch: Any) -> dict[str, Any]:
    """Torch's part of `Facts`, without GPUs; raises if torch lacks a name that this package needs."""
    from narrowgauge.system.torch_compat import cuda_architectures

    backends: list[str] = []
    distributed, is_gpu = torch.distributed, torch.version.cuda or torch.version.hip
    if distributed.is_available():
        known = {"gloo": distributed.is_gloo_available, "nccl": distributed.is_nccl_available}
        backends = [name for name, is_there in known.items() if is_there()]
    return {
        **build_of(str(torch.__version__), torch.version.cuda or "", torch.version.hip or ""),
        "architectures": tuple(cuda_architectures()),
        "backends": tuple(backends),
        "nccl": torch.cuda.nccl.version()[:3] if is_gpu and "nccl" in backends else (),
    }


def build_of(version: str, cuda: str, hip: str) -> dict[str, Any]:
    """A build of torch as `Facts`, from its version and those of CUDA and ROCm."""
    build = "rocm" if hip else "cuda" if cuda else "cpu" if version else ""
    return {"torch": version, "build": build, "library": release(hip or cuda or "0.0")}


def _gpu(torch: Any, index: int) -> dict[str, Any]:
    """The fields of `Gpu` for one GPU, as torch describes it."""
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
        "peers": tuple(other for other in others if torch.cuda.can_device_access_peer(index, other)),
        "uuid": str(getattr(properties, "uuid", "")),
        "used": total - free,
    }


def is_absent(error: str) -> bool:
    """Whether the error of an import means that torch is not installed."""
    return bool(re.search(r"No module named '?torch'?$", error))


def fix_of(error: str) -> str:
    """What to do about an error of `import torch`, by its text."""
    if is_absent(error):
        return "python -m pip install torch"
    for pattern, fix in _FIXES.items():
        if match := re.search(pattern, error):
            return match.expand(fix) if "\\1" in fix else fix
    return _REINSTALL


def words_of_import(error: BaseException) -> str:
    """The error of an import in one line: its first meaningful line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
