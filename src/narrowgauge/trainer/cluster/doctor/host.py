"""The machine around the GPUs: processes, limits, shared memory, clock, disks, compilers and the given files.

The bounds are judgements; `limits.toml` gives the reason of each.

If a program is started eight times without the launcher's variables, each process trains the whole model, all
on one GPU: the *world of one*. The doctor detects this with the code that `train` uses, `distributed.world`,
so it refuses exactly what `train` refuses, in the same words. In the shell of a Slurm batch script it only
warns. `train` is refused there, but it is where the doctor is usually started, and nothing is wrong with the
job.
"""

import contextlib
import ctypes
import os
import platform
import re
import shutil
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import narrowgauge
from narrowgauge.system.errors import UserError, words_of
from narrowgauge.system.operating_system import limits_of, system_name, triton_version
from narrowgauge.system.processes import in_time, output_of
from narrowgauge.system.units import human_bytes
from narrowgauge.trainer.cluster.doctor.facts import (
    LIMITS,
    Disk,
    Facts,
    Given,
    Verdict,
    Version,
    miss,
    of_error,
    ok,
    release,
    text_of,
    warn,
)
from narrowgauge.trainer.distributed import NotStartedBySrun, World, world_from

_OTHERWISE = "start the processes with torchrun, and leave the variables to it"
_SHARED = Path("/dev/shm")
_PIECE, _WRITING = 1 << 22, 2.0  # bytes of a piece of a test file; seconds allowed for writing all pieces
_DISK_SECONDS, _COMPILER_SECONDS = 15.0, 60.0
_NOT_SYNCHRONIZED = 5  # TIME_ERROR of <sys/timex.h>
_PROGRAM = (
    "#include <Python.h>\n#include <omp.h>\n#include <vector>\nint f() { return omp_get_max_threads(); }\n"
)


def read_system() -> dict[str, Any]:
    """The limits of this process and of the machine."""
    threads = os.environ.get("OMP_NUM_THREADS", "").strip()
    return {
        "system": system_name(),
        "machine": platform.machine(),
        "glibc": _glibc(),
        "cpu": _instruction_sets(),
        "cores": _cores(),
        "machine_cores": os.cpu_count() or 1,
        "threads": int(threads) if threads.isdecimal() else None,
        "open_files": limits_of("RLIMIT_NOFILE"),
        "locked_memory": limits_of("RLIMIT_MEMLOCK"),
        "shared_memory": read_disk(_SHARED, pieces=0) if _SHARED.exists() else None,
        "now": time.time(),
        "installed": Path(narrowgauge.__file__).stat().st_mtime,
        "synchronized": _synchronized(),
    }


def _cores() -> int:
    """The number of cores available to this process, by its affinity and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(ValueError):
        quota, period = text_of("/sys/fs/cgroup/cpu.max").split()
        cores = min(cores, max(1, -(-int(quota) // int(period))))
    return cores


def _glibc() -> Version:
    """The version of glibc; () for another C library."""
    name, version = platform.libc_ver()
    return release(version) if name == "glibc" else ()


def _instruction_sets() -> frozenset[str]:
    """The flags of the first processor in /proc/cpuinfo."""
    for line in text_of("/proc/cpuinfo").splitlines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, ARM
            return frozenset(words.split())
    return frozenset()


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
    disk = Disk(path=str(place), kind=_kind(place))
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


def _kind(place: Path) -> str:
    """The kind of the file system, from the longest mount point above the folder."""
    mounts = [line.split()[1:3] for line in text_of("/proc/self/mounts").splitlines()]
    real = Path(os.path.realpath(place))
    above = [(len(point), kind) for point, kind in mounts if real.is_relative_to(point)]
    return max(above)[1] if above else ""


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


def launcher(facts: Facts) -> Verdict:
    """The verdict on the world that the variables describe: this process's place, and where all meet."""
    world, env = _world(facts), facts.environment
    if isinstance(world, UserError):
        status = "WARN" if isinstance(world, NotStartedBySrun) else "MISS"
        return of_error(status, str(world), _OTHERWISE)
    process = f"process {world.rank} of {world.size}" if world.size > 1 else "one process"
    told = "by torchrun's variables" if env.get("RANK") else "started by itself"
    job, tasks = env.get("SLURM_JOB_ID"), env.get("SLURM_NTASKS", "1")
    inside = f", in Slurm's job {job} of {tasks} task{'s' * (tasks != '1')}" if job else ""
    meeting = f"; all meet at {world.master_addr}:{world.master_port}" if world.size > 1 else ""
    return ok(f"{process}, {told}{inside}{meeting}")


def _world(facts: Facts, gpus: int = 0) -> World | UserError:
    """The world that the variables describe, or the error with which `train` refuses it."""
    try:
        return world_from(facts.environment, gpus)
    except UserError as error:
        return error


def ranks(facts: Facts) -> Verdict | None:
    """The verdict on a world and the GPUs of this node; None if the processes do not form a world."""
    gpus, alone = len(facts.gpus), _world(facts)
    if isinstance(alone, UserError):
        return None
    world, local = _world(facts, gpus), alone.local_size
    if isinstance(world, UserError):
        return of_error("MISS", str(world), _OTHERWISE)
    if not gpus:
        return ok(f"{local} on this node, on the CPU")
    if local > gpus:
        return ok(f"{local} on this node; this one was given a GPU to itself")
    if 1 < local < gpus:
        return warn(f"{local} on this node, {gpus} GPUs", f"start {gpus} to use every GPU")
    if local < gpus:
        return ok(f"1 on this node, which uses one of {gpus} GPUs")
    return ok(f"{local} on this node, one to each GPU")


def cores(facts: Facts) -> Verdict:
    """The verdict on the cores of this process and of others on its node."""
    world = _world(facts)
    local = 1 if isinstance(world, UserError) else world.local_size
    found = f"{facts.cores} of {facts.machine_cores}"
    if facts.cores == 1 < facts.machine_cores:
        return warn(
            f"{found}: this process may use a single one, for Python, data and the GPU's queue",
            "ask the launcher for more (srun --cpus-per-task 8, mpirun --bind-to none)",
        )
    threads = facts.threads
    enough = max(1, min(facts.cores, facts.machine_cores // local))
    if threads and threads > enough:
        return warn(
            f"{found}; {local} process{'es' * (local > 1)} of OMP_NUM_THREADS={threads}",
            f"OMP_NUM_THREADS={enough}: more threads than cores take turns",
        )
    return ok(f"{found}" + (f", OMP_NUM_THREADS={threads}" if threads else ""))


def open_files(facts: Facts) -> Verdict:
    """The verdict on the limit of open files."""
    (soft, hard), enough = facts.open_files, LIMITS["open_files"]["enough"]
    if soft is None or soft >= enough:
        return ok("unlimited" if soft is None else f"{soft:,}")
    if hard is None or hard >= enough:
        return warn(f"{soft:,}", f"ulimit -n {min(hard or 65536, 65536)}")
    return warn(
        f"{soft:,}, and the user may not raise it beyond {hard:,}",
        "let the administrator raise nofile in /etc/security/limits.conf (docker run --ulimit nofile=65536)",
    )


def locked_memory(facts: Facts) -> Verdict:
    """The verdict on the limit of locked memory."""
    soft = facts.locked_memory[0]
    if soft is None:
        return ok("unlimited")
    if facts.fabric:
        return warn(
            f"{human_bytes(soft)}, and the machine has InfiniBand, whose buffers are locked",
            "ulimit -l unlimited, or memlock in /etc/security/limits.conf (docker run --ulimit memlock=-1); "
            "under Slurm, PropagateResourceLimitsExcept=MEMLOCK",
        )
    return ok(f"{human_bytes(soft)}; only InfiniBand needs more, and there is none")


def shared_memory(facts: Facts) -> Verdict:
    """The verdict on the shared memory."""
    shared, bounds = facts.shared_memory, LIMITS["shared_memory"]
    if facts.system != "Linux":
        return ok("not a file system here")
    if shared is None:
        return warn("there is no /dev/shm", "mount a tmpfs there: mount -t tmpfs tmpfs /dev/shm")
    found = f"{human_bytes(shared.free)} free of {human_bytes(shared.size)} in /dev/shm"
    if shared.error:
        return miss(f"{found}: {shared.error}", "chmod 1777 /dev/shm")
    if shared.free >= bounds["enough"]:
        return ok(found)
    fix = "docker run --shm-size 16g, or --ipc host; else mount -o remount,size=16G /dev/shm"
    if shared.size >= bounds["enough"]:
        fix = "remove what killed programs left there"
    return (miss if shared.free < bounds["least"] else warn)(found, fix)


def clock(facts: Facts) -> Verdict:
    """The verdict on the clock, by the hub's, the disks' and the kernel's word."""
    set_it = "sudo sntp -sS time.apple.com" if facts.system == "macOS" else "timedatectl set-ntp true"
    if facts.now < facts.installed - 86400:  # a day of slack: wheels carry local times
        return miss(
            "before the day this package was installed",
            f"set the clock ({set_it}): certificates and 'newest' depend on it",
        )
    ahead = facts.hub.ahead
    if ahead is not None and abs(ahead) > LIMITS["clock"]["machine"]:
        return warn(f"{_off(ahead)} the hub's", set_it)
    for disk in (facts.disk, facts.cache):
        if disk.skew is not None and abs(disk.skew) > LIMITS["clock"]["file_server"]:
            return warn(
                f"{_off(disk.skew)} that of the file system at {disk.path}",
                "let this machine and the file server follow the same time server (NTP)",
            )
    found = "plausible" + (", agrees with the hub's" if ahead is not None else "")
    if facts.synchronized is not False:
        return ok(found + (", synchronized" if facts.synchronized else ""))
    if facts.environment.get("SLURM_NNODES", "1") == "1":
        return ok(f"{found}; not known to the kernel to be synchronized")
    return warn(
        f"{found}; the kernel does not know it to be synchronized",
        "run chrony or ntpd on every node, so that their logs can be compared",
    )


def _off(ahead: float) -> str:
    """The error of this clock, given by how many seconds the other clock is ahead."""
    return f"{abs(ahead):.0f} s {'behind' if ahead > 0 else 'ahead of'}"


def disk(disk: Disk, elsewhere: str) -> Verdict:
    """The verdict on a disk; the fix is `elsewhere`, an instruction for choosing another disk."""
    bounds, kind = LIMITS["disk"], f" ({disk.kind})" if disk.kind else ""
    if disk.error:
        return warn(f"{disk.path}{kind}: {disk.error}", elsewhere)
    found = f"{disk.path}{kind}: {human_bytes(disk.free)} free of {human_bytes(disk.size)}"
    if disk.speed:
        found += f", writes {disk.speed / 1e6:,.0f} MB/s"
    if disk.inodes and disk.inodes_free is not None:
        share, fix = disk.inodes_free / disk.inodes, f"remove small files, or {elsewhere}"
        if disk.inodes_free < bounds["least_inodes"]:
            return miss(f"{found}, {disk.inodes_free} inodes free", fix)
        if share < bounds["inodes_share"]:
            return warn(f"{found}, {share:.1%} of the inodes free", fix)
    if disk.free < bounds["least"]:
        return miss(found, f"make room, or {elsewhere}")
    if disk.free < max(bounds["enough"], min(bounds["plenty"], (1 - bounds["full"]) * disk.size)):
        return warn(found, f"make room, or {elsewhere}")
    if disk.speed and disk.speed < bounds["slow"]:
        return warn(found, f"{elsewhere} (a faster file system): every save waits for this one")
    return ok(found)


def compiler(facts: Facts) -> Verdict:
    """The verdict on the compilers."""
    triton = f", Triton {facts.triton}" if facts.triton else ""
    if not facts.cc:
        on_cpu = "casts on a CPU take 2 to 4 times as long without it"
        why = "kernels on a GPU need it" if facts.gpus else on_cpu
        return warn(
            f"{facts.compiler or facts.compiler_error or 'no C compiler'}{triton}",
            f"install gcc and g++, or clang, or name them in CC and CXX: {why}; training.compile needs both",
        )
    if not facts.cxx:
        return warn(
            f"{facts.compiler_error or 'no C++ compiler'}{triton}",
            "install g++ or clang++, or name one in CXX: training.compile needs it; nothing else does",
        )
    found = f"{facts.compiler or facts.cxx}{triton}"
    if error := facts.compiler_error:
        fix = "fix the compiler, or name another in CXX: training.compile needs one"
        if "Python.h" in error:
            fix = "install Python's headers (python3-dev or python3-devel): training.compile needs them"
        elif re.search(r"openmp|omp\.h|lg?omp", error):
            how = "brew install libomp" if facts.system == "macOS" else "libomp-dev, or take g++"
            fix = f"install OpenMP for this compiler ({how}): training.compile needs it"
        return warn(f"{found}: {error}", fix)
    if facts.gpus and not facts.triton:
        how = "pip install triton"
        if any(gpu.maker == "amd" for gpu in facts.gpus):  # the package of that name is for NVIDIA's
            how = "install torch's ROCm build again, which brings its own Triton, not the package `triton`"
        return warn(f"{found}, no Triton", f"{how}: kernels and training.compile need it on a GPU")
    return ok(found)


def given(name: str, given: Given | None) -> Verdict | None:
    """The verdict on the given data or tokenizer, if one was given."""
    if given is None:
        return None
    if given.error:
        return of_error("MISS", given.error, f"name another with --{name}")
    return ok(f"{given.name}: {given.found}")
