"""The machine around the GPUs: limits, shared memory, clock, disks and compilers, as they are found."""

import contextlib
import ctypes
import os
import resource
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import narrowgauge
from narrowgauge.cluster.doctor.commands import answer_of
from narrowgauge.cluster.doctor.facts import Compiler, Disk, System

_PIECE, _PIECES, _WRITING = 1 << 22, 16, 2.0  # bytes, pieces of a test file at most, seconds
_DISK_SECONDS, _COMPILER_SECONDS = 15.0, 60.0
_NOT_SYNCHRONIZED = 5  # TIME_ERROR of <sys/timex.h>
_PROGRAM = (
    "#include <Python.h>\n#include <omp.h>\n#include <vector>\nint f() { return omp_get_max_threads(); }\n"
)


def collect_system() -> System:
    """Limits of this process and of the machine."""
    threads = os.environ.get("OMP_NUM_THREADS", "").strip()
    size, free, error = _shared_memory()
    package = Path(narrowgauge.__file__)
    return System(
        cores=_cores(),
        machine_cores=os.cpu_count() or 1,
        threads=int(threads) if threads.isdecimal() else None,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        linux=sys.platform == "linux",
        shm_size=size,
        shm_free=free,
        shm_error=error,
        now=time.time(),
        installed=package.stat().st_mtime,
        synchronized=_synchronized(),
    )


def _cores() -> int:
    """Cores that this process may use, by its affinity and by the quota of its group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, -(-int(quota) // int(period))))
    return cores


def _limit(which: int) -> tuple[int | None, int | None]:
    soft, hard = (None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(which))
    return soft, hard


def _shared_memory() -> tuple[int | None, int | None, str]:
    """(size, free bytes, why it cannot be written to) of /dev/shm."""
    try:
        found = shutil.disk_usage("/dev/shm")
    except OSError:
        return None, None, ""
    error = ""
    try:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.write(b"0")
    except OSError as problem:
        error = problem.strerror or str(problem)
    return found.total, found.free, error


def _synchronized() -> bool | None:
    """Whether the kernel's clock follows another; None where it does not say."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # modes 0: only ask
    except (OSError, AttributeError):
        return None
    return None if state < 0 else bool(state != _NOT_SYNCHRONIZED)


def collect_disk(folder: Path) -> Disk:
    """Space, speed and clock of the file system that a folder is on, or would be."""
    place = folder.absolute()
    answers: list[Disk] = []
    thread = threading.Thread(target=lambda: answers.append(_disk(place)), daemon=True)
    thread.start()
    thread.join(_DISK_SECONDS)
    late = f"no answer in {_DISK_SECONDS:.0f} s; a file server may be away"
    return answers[0] if answers else Disk(path=str(place), error=late)


def _disk(place: Path) -> Disk:
    """As `collect_disk`, however long it takes."""
    while not place.exists() and place != place.parent:
        place = place.parent
    path, kind = str(place), _kind(place)
    try:
        space, inodes = shutil.disk_usage(place), os.statvfs(place)
        speed, skew = _write(place, min(_PIECES, space.free // (4 * _PIECE)))
    except OSError as problem:
        return Disk(path=path, kind=kind, error=problem.strerror or str(problem))
    return Disk(
        path=path,
        kind=kind,
        size=space.total,
        free=space.free,
        inodes=inodes.f_files or None,
        inodes_free=inodes.f_favail if inodes.f_files else None,
        speed=speed,
        skew=skew,
    )


def _write(place: Path, pieces: int) -> tuple[float | None, float]:
    """(bytes a second of a file written and flushed, seconds its clock is ahead); the file is gone after."""
    block = os.urandom(_PIECE)  # a file system that compresses gains nothing
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


def _kind(place: Path) -> str:
    """The kind of file system, by the longest mount point above the folder."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
        real = place.resolve()
    except OSError:
        return ""
    above = [(len(point), kind) for point, kind in mounts if real.is_relative_to(point)]
    return max(above)[1] if above else ""


def collect_compiler() -> Compiler:
    """The C++ compiler that torch.compile would take, tried on a small program, and Triton."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    named = os.environ.get("CXX")
    for name in (named,) if named else ("g++", "clang++", "c++"):
        if cxx := shutil.which(name):
            break
    else:
        return Compiler(error=f"CXX={named}, which is no program" if named else "", triton=triton)
    first = (answer_of([cxx, "--version"], _COMPILER_SECONDS).out.splitlines() or [""])[0]
    return Compiler(cxx=cxx, version=first, error=_compile(cxx), triton=triton)


def _compile(cxx: str) -> str:
    """Why the compiler cannot make a library of a small program; "" if it can."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "program.cpp")
        source.write_text(_PROGRAM)
        headers = sysconfig.get_path("include")
        flags = ["-std=c++17", "-fopenmp", "-shared", "-fPIC", f"-I{headers}"]
        made = answer_of([cxx, *flags, str(source), "-o", str(source.with_suffix(".so"))], _COMPILER_SECONDS)
    if made.code == 0:
        return ""
    lines = [line for line in made.error.splitlines() if "error" in line.lower()] or [
        made.error or "it failed"
    ]
    return lines[0].replace(f"{folder}/", "")[:200]
