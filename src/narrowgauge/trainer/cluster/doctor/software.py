"""The system, Python, torch, the driver and other packages: whether the software fits this machine.

Packages are examined without importing them.

CUDA's compatibility rules: a program built with CUDA M.n runs with any driver of major version M or later;
with a driver older than n it may lack features added in between (NVIDIA, "CUDA Compatibility").
"""

import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

from narrowgauge.trainer.cluster.doctor.facts import (
    LIMITS,
    Facts,
    Verdict,
    Version,
    count,
    dotted,
    miss,
    ok,
    release,
    warn,
)
from narrowgauge.trainer.cluster.doctor.torch_setup import build_of, fix_of, is_absent, right_build

_OLDEST = LIMITS["version"]
_NAMES = {"cuda": "CUDA", "rocm": "ROCm"}
_BUILDS = {"nvidia": "cuda", "amd": "rocm"}
_MAKERS = {"nvidia": "NVIDIA", "amd": "AMD"}
_WHERE = "(pytorch.org, 'Get Started', has the line)"


def read_software(torch: dict[str, Any]) -> dict[str, Any]:
    """Python, torch (from its own report, or its files if it cannot be imported), and the other packages."""
    folder = folder_of("torch")
    written = _written(folder) if folder and "torch" not in torch else build_of("", "", "")
    return (
        written
        | torch
        | {
            "python": tuple(sys.version_info[:3]),
            "packages": {name: _version(name) for name in LIMITS["packages"]},
            "needed_glibc": _glibc_of(folder) if folder else (),
        }
    )


def folder_of(name: str) -> Path | None:
    """The folder, or the file, from which a package would be imported; None if absent."""
    try:
        spec = find_spec({"nvidia-ml-py": "pynvml"}.get(name, name))
    except (ImportError, ValueError):  # an import hook may refuse the name
        return None
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else [None]
    return Path(places[0]) if places[0] else None


def _written(folder: Path) -> dict[str, Any]:
    """The build of torch by its `version.py`, which has the versions of torch, CUDA and ROCm and imports
    nothing of it."""
    found: dict[str, Any] = {}
    with suppress(Exception):  # whatever a broken installation raises
        found = run_path(str(folder / "version.py"))
    return build_of(*(str(found.get(name) or "") for name in ("__version__", "cuda", "hip")))


def _glibc_of(folder: Path) -> Version:
    """The glibc that the torch wheel in this folder was built for: its tag `manylinux_2_28`."""
    try:
        wheel = distribution("torch")
        if Path(str(wheel.locate_file("torch"))).resolve() != folder.resolve():
            return ()
        tags = re.findall(r"manylinux_(\d+)_(\d+)", wheel.read_text("WHEEL") or "")
    except PackageNotFoundError:
        return ()
    return min(((int(major), int(minor)) for major, minor in tags), default=())


def _version(name: str) -> str:
    """The version of an importable package; "" if it is missing."""
    if folder_of(name) is None:
        return ""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def system(facts: Facts) -> Verdict:
    """The verdict on the operating system, the C library and the processor."""
    if facts.system == "Windows":
        return warn(
            f"Windows {facts.machine}: the library, recipes, formats and doctor work, runs do not",
            "use WSL 2 (Windows Subsystem for Linux) for everything else",
        )
    if facts.system != "Linux":
        found = f"{facts.system} {facts.machine}"
        if facts.torch_error and facts.machine != "arm64":
            return miss(found, "use Linux, or a Mac with an Apple processor: there is no torch for others")
        return warn(f"{found}: narrowgauge was written and tested on Linux", "use Linux for runs that matter")
    return _linux(facts)


def _linux(facts: Facts) -> Verdict:
    """The verdict on a Linux. The requirements of torch's wheels matter only if torch cannot be imported."""
    needed = facts.needed_glibc or _OLDEST["glibc"]
    library = f"glibc {dotted(facts.glibc)}" if facts.glibc else "a C library other than glibc"
    found = f"Linux {facts.machine}, {library}"
    if facts.torch_error and facts.machine not in ("x86_64", "aarch64"):
        return miss(found, "build torch from its source: it has wheels for x86_64 and aarch64")
    if facts.torch_error and (not facts.glibc or facts.glibc < needed):
        whose = f"torch {facts.torch}" if facts.torch else "torch's wheels"
        return miss(
            f"{found}; {whose} need{'s' if facts.torch else ''} glibc {dotted(needed)} or later",
            "use a newer Linux (RHEL 8, Debian 10, Ubuntu 20.04 or later), or a container of one (Apptainer, "
            "Docker)",
        )
    if facts.machine != "x86_64" or not facts.cpu:
        return ok(found)
    if "avx2" not in facts.cpu:
        return warn(
            f"{found}, no AVX2: torch is slow here, and a build for later processors ends in SIGILL",
            "choose a machine with AVX2, or in a virtual machine a CPU model that shows it (-cpu host)",
        )
    best = "AVX-512" if "avx512f" in facts.cpu else "AVX2"
    return ok(f"{found}, {best}" + (", AMX" if "amx_bf16" in facts.cpu else ""))


def packages(facts: Facts) -> Verdict:
    """The verdict on the packages other than torch."""
    there = facts.packages
    missing = [name for name, version in there.items() if not version]
    if missing:
        return miss(f"missing: {', '.join(missing)}", f"python -m pip install {' '.join(missing)}")
    old = [n for n, v in there.items() if v != "unknown" and release(v) < LIMITS["packages"][n]]
    if old:
        wanted = " ".join(f"'{name}>={dotted(LIMITS['packages'][name])}'" for name in old)
        found = ", ".join(f"{name} {there[name]}" for name in old)
        return miss(f"too old: {found}", f"python -m pip install {wanted}")
    return ok(", ".join(f"{name} {version}" for name, version in there.items()))


def python(facts: Facts) -> Verdict:
    """The verdict on the version of Python."""
    version, oldest = facts.python, _OLDEST["python"]
    if version[:2] < oldest:
        return miss(dotted(version), f"install Python {dotted(oldest)} or later")
    newest = _OLDEST["newest_python"]
    if facts.torch_error and version[:2] > newest:
        found = f"{dotted(version)}, for which torch may have no wheel yet"
        return warn(found, f"install Python {dotted(oldest)} to {dotted(newest)}")
    return ok(dotted(version))


def torch(facts: Facts) -> Verdict:
    """The verdict on the version and the build of torch."""
    makers, error = facts.makers, facts.torch_error
    maker = max(makers, default="")
    build = _right_build(facts, maker)
    if not facts.torch and not is_absent(error):
        return miss(f"it does not import: {error}", fix_of(error))
    if not facts.torch:
        smaller = "python -m pip install torch; without a GPU the build for CPUs is smaller"
        return miss("not installed", f"{f'install {build}' if maker else smaller} {_WHERE}")
    library = f" {dotted(facts.library)}" if facts.build != "cpu" else ""
    found = f"{facts.torch}, built for {_NAMES.get(facts.build, 'CPUs')}{library}"
    if release(facts.torch) < _OLDEST["torch"]:
        return miss(found, f"install {build}")
    if error:
        return miss(f"{found}; it does not import: {error}", fix_of(error))
    if makers and not any(_BUILDS[one] == facts.build for one in makers):
        there = count(makers.count(maker), f"{_MAKERS[maker]} GPU")
        return miss(f"{found}; this machine has {there}", f"install {build} instead {_WHERE}")
    return ok(found)


def _right_build(facts: Facts, maker: str) -> str:
    """The build of torch for a GPU of this maker, or any that suffices."""
    return right_build(facts, maker) or right_build(facts, "")


def driver(facts: Facts) -> Verdict:
    """The verdict on the driver of the GPUs."""
    if not facts.makers:
        return ok("no GPU, no driver")
    newest, found = facts.driver_cuda, facts.driver or "of unknown version"
    if "nvidia" not in facts.makers:
        return ok(f"amdgpu {found}")
    if newest is None:
        return miss(
            f"NVIDIA {found}, and its library libcuda.so.1 does not load",
            "install NVIDIA's driver, or start the container with its GPUs (docker run --gpus all)",
        )
    found = f"NVIDIA {found}, for CUDA up to {dotted(newest)}"
    update = (
        f"update the driver ({_OLDEST['driver']} or later for CUDA 12, {_OLDEST['driver_13']} for CUDA 13)"
    )
    if newest < _OLDEST["cuda"]:
        return miss(f"{found}; torch {dotted(_OLDEST['torch'])} and later bring CUDA 12 or 13", update)
    if facts.build != "cuda" or newest >= facts.library:
        return ok(found)
    built = f"torch was built for CUDA {dotted(facts.library)}"
    fix = f"{update}, or install {_right_build(facts, 'nvidia')}"
    if newest[0] < facts.library[0]:
        return miss(f"{found}; {built}", fix)
    return warn(f"{found}; {built}: it runs, without what is newer than the driver", fix)
