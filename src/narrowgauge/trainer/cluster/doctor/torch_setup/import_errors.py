"""Why importing torch failed and what to do, from the error text of the dynamic loader or of Python.

The texts come from glibc's loader (`version ... not found`, `cannot open shared object file`, `undefined
symbol`), of the loaders of macOS and Windows, and of Python's import system. The first match applies.
"""

import re

_REINSTALL = (
    "in a new environment, install torch with its dependencies (python -m pip install torch, no --no-deps)"
)
UNKNOWN = "narrowgauge does not know this torch"  # begins the error for a torch that imports but does not fit
_FIXES = (
    (UNKNOWN, "install torch 2.13, with which this version of narrowgauge was tested"),
    (
        r"version .GLIBC_([\d.]+)' not found",
        r"it was built for glibc \1 or later: use a newer Linux (for torch 2.11 and later RHEL 8, Debian 10, "
        r"Ubuntu 20.04 or later), or a container of one (Apptainer, Docker)",
    ),
    (
        r"version .(?:GLIBCXX|CXXABI)_[\d.]+' not found",
        "an older libstdc++ is found first: unset LD_LIBRARY_PATH, or load a newer GCC (module load gcc; "
        "conda install -c conda-forge libstdcxx-ng)",
    ),
    (
        r"undefined symbol: nccl|libnccl.*undefined symbol",
        "another NCCL is found first: unset LD_LIBRARY_PATH and LD_PRELOAD, or reinstall torch's own",
    ),
    (
        r"undefined symbol|symbol not found",
        "torch and a library that it loads are of different versions: unset LD_LIBRARY_PATH and "
        f"LD_PRELOAD; else, {_REINSTALL}",
    ),
    (
        r"libcuda\.so\.1: cannot open",
        "install NVIDIA's driver, start the container with the GPUs (docker run --gpus all), or install "
        "the build for CPUs",
    ),
    (
        r"lib(?:cu(?!rl)|nv|nccl)[\w.-]*\.so[\d.]*: cannot open",
        f"a CUDA library that torch's wheel depends on as a separate package is missing: {_REINSTALL}; a "
        "torch of a cluster's module wants that module loaded (module load cuda)",
    ),
    (
        r"lib(?:amd|hip|roc|hsa|MIOpen|rccl)[\w.-]*\.so[\d.]*: cannot open",
        "load the ROCm that it was built for (module load rocm), or install the build for this machine",
    ),
    (
        r"(lib[\w+.-]*\.so[\d.]*): cannot open",
        r"install \1 with the system's packages or load its module, or " + _REINSTALL,
    ),
    (
        r"SIGILL",
        "this CPU, or the one that a virtual machine shows, lacks an instruction that torch was built with: "
        "choose a machine with AVX2, or build torch from its source here",
    ),
    (
        r"killed by SIG",
        f"a library crashed while it was loaded: unset LD_PRELOAD and LD_LIBRARY_PATH; else, {_REINSTALL}",
    ),
    (
        r"no answer in",
        "the file system that Python's packages are on is slow or away: copy the environment to a local disk",
    ),
    (
        r"WinError|DLL load failed",
        f"install Microsoft's Visual C++ Redistributable; else, {_REINSTALL}",
    ),
    (
        r"incompatible architecture|wrong ELF class|mach-o",
        f"this build is for another processor: {_REINSTALL}",
    ),
    (
        r"torch\._C|PyTorch C extensions|partially initialized|cannot import name|has no attribute",
        "a folder or file named torch may hide it: start in another folder, look at PYTHONPATH; else, "
        + _REINSTALL,
    ),
)


def is_absent(error: str) -> bool:
    """Whether the error of an import means that torch is not installed."""
    return bool(re.search(r"No module named '?torch'?$", error))


def fix_of(error: str) -> str:
    """What to do about an error of `import torch`, by its text."""
    if is_absent(error):
        return "python -m pip install torch"
    for pattern, fix in _FIXES:
        if match := re.search(pattern, error):
            return match.expand(fix) if "\\1" in fix else fix
    return _REINSTALL


def words_of_import(error: BaseException) -> str:
    """The error of an import in one line: its first meaningful line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
