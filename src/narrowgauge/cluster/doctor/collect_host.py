"""Reads the facts of the machine around the GPUs: limits, shared memory, clock, disks and compilers."""

import contextlib
import ctypes
import os
import platform
import shutil
import sysconfig
import tempfile
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import narrowgauge
from narrowgauge.cluster.doctor.facts import Compiler, Disk, System, Version
from narrowgauge.errors import words_of
from narrowgauge.operating_system import limits_of, system_name
from narrowgauge.processes import in_time, output_of

_SHARED = Path("/dev/shm")
_PIECE, _WRITING = 1 << 22, 2.0  # bytes of a piece of a test file, seconds that all may take
_DISK_SECONDS, _COMPILER_SECONDS = 15.0, 60.0
_NOT_SYNCHRONIZED = 5  # TIME_ERROR of <sys/timex.h>
_PROGRAM = (
    "#include <Python.h>\n#include <omp.h>\n#include <vector>\nint f() { return omp_get_max_threads(); }\n"
)


def collect_system() -> System:
    """Limits of this process and of the machine."""
    threads = os.environ.get("OMP_NUM_THREADS", "").strip()
    return System(
        cores=_cores(),
        machine_cores=os.cpu_count() or 1,
        threads=int(threads) if threads.isdecimal() else None,
        open_files=limits_of("RLIMIT_NOFILE"),
        locked_memory=limits_of("RLIMIT_MEMLOCK"),
        name=system_name(),
        machine=platform.machine(),
        glibc=_glibc(),
        cpu=_instruction_sets(),
        shared_memory=collect_disk(_SHARED, pieces=0) if _SHARED.exists() else None,
        now=time.time(),
        installed=Path(narrowgauge.__file__).stat().st_mtime,
        synchronized=_synchronized(),
    )


def _cores() -> int:
    """Cores that this process may use, by its affinity and by the quota of its group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, -(-int(quota) // int(period))))
    return cores


def _glibc() -> Version:
    """The version of glibc; () where there is another C library."""
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""  # "glibc 2.36"
    except (AttributeError, OSError, ValueError):
        return ()
    return tuple(int(part) for part in text.removeprefix("glibc ").split(".")[:2] if part.isdecimal())


def _instruction_sets() -> frozenset[str]:
    """The flags of the first processor in /proc/cpuinfo."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, words = line.partition(":")
            if name.strip() in ("flags", "Features"):  # x86, ARM
                return frozenset(words.split())
    return frozenset()


def _synchronized() -> bool | None:
    """Whether the kernel's clock follows another; None where it does not say."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # modes 0: only ask
    except (OSError, AttributeError, TypeError):  # TypeError: Windows has no library of the process itself
        return None
    return None if state < 0 else bool(state != _NOT_SYNCHRONIZED)


def collect_disk(folder: Path, pieces: int = 16) -> Disk:
    """Space, clock and speed of the file system that a folder is on, or would be.

    Args:
        folder: need not exist.
        pieces: of 4 MiB, written at most to measure the speed; 0: it is not measured.
    """
    place = folder.absolute()
    late = Disk(path=str(place), error=f"no answer in {_DISK_SECONDS:.0f} s; a file server may be away")
    return in_time(lambda: _disk(place, pieces), _DISK_SECONDS, late)


def _disk(place: Path, pieces: int) -> Disk:
    """The facts of `collect_disk`, however long they take."""
    while not place.exists() and place != place.parent:
        place = place.parent
    disk = Disk(path=str(place), kind=_kind(place))
    try:
        space = shutil.disk_usage(place)
        disk = replace(disk, size=space.total, free=space.free)
        if hasattr(os, "statvfs") and (inodes := os.statvfs(place)).f_files:
            disk = replace(disk, inodes=inodes.f_files, inodes_free=inodes.f_favail)
        speed, skew = _write(place, min(pieces, space.free // (4 * _PIECE)))
        return replace(disk, speed=speed, skew=skew)
    except OSError as error:
        return replace(disk, error=words_of(error))


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
    """The compilers of C and, tried on a small program, of the C++ that torch.compile writes; and Triton."""
    cc = next(filter(None, map(shutil.which, [_c_named(), "gcc", "clang", "cc"])), "")
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    named = os.environ.get("CXX")
    for name in (named,) if named else ("g++", "clang++", "c++"):
        if cxx := shutil.which(name):
            break
    else:
        return Compiler(cc=cc, error=f"CXX={named}, which is no program" if named else "", triton=triton)
    first = (output_of([cxx, "--version"], _COMPILER_SECONDS).out.splitlines() or [""])[0]
    return Compiler(cc=cc, cxx=cxx, version=first, error=_compile(cxx), triton=triton)


def _c_named() -> str:
    """The program in $CC, which may have options behind it; "" if there is none."""
    return (os.environ.get("CC", "").split() or [""])[0]


def _compile(cxx: str) -> str:
    """Why the compiler cannot make a library of a small program; "" if it can."""
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
