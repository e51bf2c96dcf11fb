"""Reads the facts of this machine: software, GPUs, limits, disks, compilers, and data that the user names.

It only reads, apart from one temporary file on each disk. Packages are examined without importing them, and
what is missing, broken or does not answer is a fact like any other.
"""

import ctypes
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from itertools import combinations
from pathlib import Path
from runpy import run_path
from typing import Any

import narrowgauge
from narrowgauge.system.errors import UserError, words_of
from narrowgauge.system.files import cache_directory, user_path
from narrowgauge.system.operating_system import limits_of, system_name, triton_version
from narrowgauge.system.processes import in_time, output_of
from narrowgauge.trainer.cluster.doctor.facts import (
    LIMITS,
    Disk,
    Facts,
    Gpu,
    Verdict,
    Version,
    folder_of,
    miss,
    ok,
    release,
    verdict_of,
)
from narrowgauge.trainer.cluster.doctor.network import ask_hub
from narrowgauge.trainer.cluster.doctor.torch_setup import ask_torch, build_of

Uses = Mapping[str, Mapping[str, Any]]  # `used`, `busy` and `processes` by GPU id
_DRIVER_SECONDS, _DISK_SECONDS, _COMPILER_SECONDS = 15.0, 15.0, 60.0
_LINKS = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # by nvmlGpuTopologyLevel_t
_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
_SHARED = Path("/dev/shm")
_PIECE, _WRITING = 1 << 22, 2.0  # bytes of a piece of a test file; seconds allowed for writing all pieces
_NOT_SYNCHRONIZED = 5  # TIME_ERROR of <sys/timex.h>
_PROGRAM = (
    "#include <Python.h>\n#include <omp.h>\n#include <vector>\nint f() { return omp_get_max_threads(); }\n"
)


def read_facts(data: str | None = None, tokenizer: str | None = None) -> Facts:
    """The facts of this machine, and of the given data and tokenizer."""
    torch, folder = ask_torch(), folder_of("torch")
    written = _written(folder) if folder and "torch" not in torch else build_of("", "", "")
    library, glibc = platform.libc_ver()
    flags = re.search(r"^(?:flags|Features)\s*:(.*)", _text_of("/proc/cpuinfo"), re.MULTILINE)  # x86, ARM
    threads = os.environ.get("OMP_NUM_THREADS", "").strip()
    facts = Facts(
        **written | torch | _gpus(torch) | read_compilers(),
        python=tuple(sys.version_info[:3]),
        packages={name: _version(name) for name in LIMITS["packages"]},
        needed_glibc=_glibc_of(folder) if folder else (),
        system=system_name(),
        machine=platform.machine(),
        glibc=release(glibc) if library == "glibc" else (),
        cpu=frozenset(flags[1].split() if flags else ()),
        cores=_cores(),
        machine_cores=os.cpu_count() or 1,
        threads=int(threads) if threads.isdecimal() else None,
        open_files=limits_of("RLIMIT_NOFILE"),
        locked_memory=limits_of("RLIMIT_MEMLOCK"),
        shared_memory=read_disk(_SHARED, pieces=0) if _SHARED.exists() else None,
        now=time.time(),
        installed=Path(narrowgauge.__file__).stat().st_mtime,
        synchronized=_synchronized(),
        environment=dict(os.environ),
        disk=read_disk(Path.cwd()),
        cache=read_disk(cache_directory()),
        hub=ask_hub(),
    )
    sources = (data or "").split(",")
    return replace(
        facts,
        wants_hub=any(name.strip().startswith("hf:") for name in sources),
        data=_given("data", data, facts.torch_works),
        tokenizer=_given("tokenizer", tokenizer, facts.torch_works),
    )


def _text_of(path: str | Path) -> str:
    """The text of a small file below /proc or /sys; "" if it does not exist."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _version(name: str) -> str:
    """The version of an importable package; "" if it is missing."""
    if folder_of(name) is None:
        return ""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


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


def _gpus(torch: Mapping[str, Any]) -> dict[str, Any]:
    """The GPUs of this machine: those with a device file, those of NVIDIA's driver, and torch's."""
    nothing: tuple[dict[str, Any], Uses] = {}, {}
    nvidia, uses = in_time(nvidia_driver, _DRIVER_SECONDS, nothing)
    files = len(list(Path("/dev").glob("nvidia[0-9]*")))  # WSL has none, but the driver answers
    makers = ("nvidia",) * (files or len(uses)) + ("amd",) * _amd_gpus()
    gpus = joined(torch.get("gpus", ()), uses)
    facts: dict[str, Any] = nvidia or {"driver": _text_of("/sys/module/amdgpu/version")}
    if len(gpus) != len(uses):  # links may belong to GPUs that torch does not see
        facts.pop("links", None)
    devices = Path("/sys/bus/pci/devices").glob("*")
    on_bus = [one for one in devices if _text_of(one / "class").startswith(_GPU_CLASSES)]
    known = filter(None, (_VENDORS.get(_text_of(one / "vendor"), "") for one in on_bus))
    return facts | {
        "makers": makers or tuple(gpu.maker for gpu in gpus),
        "on_bus": tuple(sorted(known)),
        "gpus": gpus,
        "fabric": any(Path("/sys/class/infiniband").glob("*")),
    }


def nvidia_driver() -> tuple[dict[str, Any], Uses]:
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
    if not gpus:
        return {}, {}
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

    cuda = told("nvmlSystemGetCudaDriverVersion_v2")  # of libcuda.so.1: none where that does not load
    capabilities = [told("nvmlDeviceGetCudaComputeCapability", gpu) for gpu in gpus]
    return {
        "driver": told("nvmlSystemGetDriverVersion") or "",
        "driver_cuda": cuda and (cuda // 1000, cuda % 1000 // 10),
        "capabilities": tuple(filter(None, capabilities)),
        "links": tuple(sorted({link(a, b) for a, b in combinations(gpus, 2)} - {""})),
    }, uses


def _amd_gpus() -> int:
    """The number of AMD GPUs with dedicated memory that ROCm's driver knows."""
    if not Path("/dev/kfd").exists():
        return 0
    count = 0
    for node in Path("/sys/class/kfd/kfd/topology/nodes").glob("*"):
        banks = "\n".join(_text_of(bank) for bank in node.glob("mem_banks/*/properties"))
        sizes = re.findall(r"^size_in_bytes (\d+)$", banks, re.MULTILINE)
        is_gpu = re.search(r"^simd_count [1-9]", _text_of(node / "properties"), re.MULTILINE)
        count += bool(is_gpu and sum(map(int, sizes)) >= LIMITS["gpu"]["integrated"])
    return count


def joined(gpus: Sequence[Mapping[str, Any]], uses: Uses) -> tuple[Gpu, ...]:
    """The GPUs that torch described (`ask_torch`), completed with the driver's figures."""
    return tuple(Gpu(**{**gpu, **uses.get(f"GPU-{gpu['uuid']}", {})}) for gpu in gpus)


def _cores() -> int:
    """The number of cores available to this process, by its affinity and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(ValueError):
        quota, period = _text_of("/sys/fs/cgroup/cpu.max").split()
        cores = min(cores, max(1, -(-int(quota) // int(period))))
    return cores


def _synchronized() -> bool | None:
    """Whether the kernel's clock is synchronized; None if the kernel does not report it."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # modes 0: query only
    except (OSError, AttributeError, TypeError):  # TypeError: Windows has no library of the process itself
        return None
    return None if state < 0 else bool(state != _NOT_SYNCHRONIZED)


def read_disk(folder: Path, pieces: int = 16) -> Disk:
    """Space, clock and speed of the file system that a folder is on, or would be on.

    At most `pieces` of 4 MiB are written to measure the speed; 0 skips the measurement.
    """
    place = folder.absolute()
    late = Disk(path=str(place), error=f"no answer in {_DISK_SECONDS:.0f} s; a file server may be away")
    return in_time(lambda: _facts_of_disk(place, pieces), _DISK_SECONDS, late)


def _facts_of_disk(place: Path, pieces: int) -> Disk:
    """The facts of `read_disk`, without a time limit."""
    while not place.exists() and place != place.parent:
        place = place.parent
    real, mounts = Path(os.path.realpath(place)), _text_of("/proc/self/mounts").splitlines()
    above = [
        (len(point), kind) for _, point, kind, *_ in map(str.split, mounts) if real.is_relative_to(point)
    ]
    disk = Disk(path=str(place), kind=max(above)[1] if above else "")
    try:
        space = shutil.disk_usage(place)
        disk = disk._replace(size=space.total, free=space.free)
        if hasattr(os, "statvfs") and (inodes := os.statvfs(place)).f_files:
            disk = disk._replace(inodes=inodes.f_files, inodes_free=inodes.f_favail)
        speed, skew = _write(place, min(pieces, space.free // (4 * _PIECE)))
        return disk._replace(speed=speed, skew=skew)
    except OSError as error:
        return disk._replace(error=words_of(error))


def _write(place: Path, pieces: int) -> tuple[float | None, float]:
    """(bytes/s of writing and flushing a file, seconds by which its clock is ahead). The file is deleted."""
    block = os.urandom(_PIECE)  # random, so that file systems cannot compress it
    with tempfile.TemporaryFile(dir=place, prefix=".narrowgauge-doctor-") as file:
        before = time.time()
        start, written = time.perf_counter(), 0
        while written < pieces and time.perf_counter() - start < _WRITING:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written += 1
        seconds = time.perf_counter() - start
        file.write(b"0")
        file.flush()
        after, stamp = time.time(), os.fstat(file.fileno()).st_mtime
    skew = max(0.0, stamp - after) or min(0.0, stamp - before)
    return (written * _PIECE / seconds if written else None), skew


def read_compilers() -> dict[str, str]:
    """The C compiler, the C++ compiler that torch.compile uses (tried on a small program), and Triton."""
    named_c = (os.environ.get("CC", "").split() or [""])[0]  # without the options that may follow it
    named = os.environ.get("CXX")
    facts = {"cc": _found(named_c, "gcc", "clang", "cc"), "triton": triton_version()}
    cxx = _found(*([named] if named else ["g++", "clang++", "c++"]))
    if not cxx:
        return facts | {"compiler_error": f"CXX={named}, which is not a program" if named else ""}
    first = (output_of([cxx, "--version"], _COMPILER_SECONDS).out.splitlines() or [""])[0]
    return facts | {"cxx": cxx, "compiler": first, "compiler_error": _compile(cxx)}


def _found(*names: str) -> str:
    """The path of the first of the programs that is there; "" if none is."""
    return next(filter(None, map(shutil.which, names)), "")


def _compile(cxx: str) -> str:
    """Why the compiler cannot build a library from a small program; "" if it can."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "program.cpp")
        source.write_text(_PROGRAM)
        headers = sysconfig.get_path("include")
        flags = ["-std=c++17", "-fopenmp", "-shared", "-fPIC", f"-I{headers}"]
        made = output_of([cxx, *flags, str(source), "-o", str(source.with_suffix(".so"))], _COMPILER_SECONDS)
    if made.code == 0:
        return ""
    lines = [line for line in made.error.splitlines() if "error" in line.lower()]
    return (lines or [made.error or "it failed"])[0].replace(f"{folder}/", "")[:200]


def _given(what: str, name: str | None, torch_works: bool) -> Verdict | None:
    """The verdict on data or a tokenizer that the user named; finding them needs torch."""
    if name is None:
        return None
    if not torch_works:
        return miss(f"{name}: not looked at", "fix torch and the packages first (see above)")
    try:
        return ok(f"{name}: {_data(name) if what == 'data' else _tokenizer(name)}")
    except (UserError, OSError) as error:
        return verdict_of(miss, error, f"name another with --{what}")


def _data(name: str) -> str:
    """The kinds of the sources; nothing is prepared."""
    from narrowgauge.trainer.data import is_corpus, open_corpus, split_sources
    from narrowgauge.trainer.data.sources.readers import HUB, open_source
    from narrowgauge.trainer.data.token_files.source import token_files

    def kind(source: str) -> str:
        if source.startswith(HUB):
            return "a data set of the Hugging Face hub"
        if is_corpus(folder := user_path(source)):
            tokens = open_corpus(folder).manifest.train_tokens
            return f"a prepared corpus, whole: {tokens:,} tokens to train on"
        if files := token_files(source):
            train, val = files
            return f"token files: {len(train)} to train on, {len(val) or 'the tail of them'} held out"
        return f"text: {len(open_source(source).inputs):,} files"

    return "; ".join(map(kind, split_sources(name)))


def _tokenizer(name: str) -> str:
    """The size of the tokenizer."""
    from narrowgauge.trainer.data import load_tokenizer
    from narrowgauge.trainer.data.tokenization.tokenizer import tokenizer_identity

    if tokenizer_identity(name) == name:
        return "needs no file"
    return f"{load_tokenizer(user_path(name)).vocab_size:,} tokens"
