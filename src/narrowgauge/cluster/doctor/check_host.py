"""The verdicts on the machine around the GPUs: limits, shared memory, clock, disks, compiler and given files.

The bounds are judgements; `limits.toml` has each with its reason.
"""

import re

from narrowgauge.cluster.doctor.facts import (
    LIMITS,
    Compiler,
    Disk,
    Facts,
    Given,
    Verdict,
    miss,
    of_error,
    ok,
    warn,
)
from narrowgauge.units import human_bytes


def check_host(facts: Facts) -> dict[str, Verdict]:
    """The verdicts by item; those on data and a tokenizer only where they are given."""
    given = {"data": facts.data, "tokenizer": facts.tokenizer}
    return {
        "open-files": _open_files(facts),
        "locked-memory": _locked_memory(facts),
        "shared-memory": _shared_memory(facts),
        "clock": _clock(facts),
        "disk": _disk(facts.disk, "go to another folder, or name one with --out"),
        "cache": _disk(facts.cache, "name another folder in NARROWGAUGE_CACHE"),
        "compiler": _compiler(facts),
        **{name: _given(name, what) for name, what in given.items() if what},
    }


def _open_files(facts: Facts) -> Verdict:
    (soft, hard), enough = facts.system.open_files, LIMITS["open_files"]["enough"]
    if soft is None or soft >= enough:
        return ok("unlimited" if soft is None else f"{soft:,}")
    if hard is None or hard >= enough:
        return warn(f"{soft:,}", f"ulimit -n {min(hard or 65536, 65536)}")
    return warn(
        f"{soft:,}, and the user may not raise it beyond {hard:,}",
        "let the administrator raise nofile in /etc/security/limits.conf (docker run --ulimit nofile=65536)",
    )


def _locked_memory(facts: Facts) -> Verdict:
    soft = facts.system.locked_memory[0]
    if soft is None:
        return ok("unlimited")
    if facts.hardware.fabric:
        return warn(
            f"{human_bytes(soft)}, and the machine has InfiniBand, whose buffers are locked",
            "ulimit -l unlimited, or memlock in /etc/security/limits.conf (docker run --ulimit memlock=-1); "
            "under Slurm, PropagateResourceLimitsExcept=MEMLOCK",
        )
    return ok(f"{human_bytes(soft)}; only InfiniBand needs more, and there is none")


def _shared_memory(facts: Facts) -> Verdict:
    shared, bounds = facts.system.shared_memory, LIMITS["shared_memory"]
    if facts.system.name != "Linux":
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


def _clock(facts: Facts) -> Verdict:
    system = facts.system
    if system.now < system.installed - 86400:  # a day: wheels carry local times
        return miss(
            "before the day this package was installed",
            f"set the clock ({_set_clock(system.name)}): certificates and 'newest' depend on it",
        )
    ahead = facts.hub.ahead
    if ahead is not None and abs(ahead) > LIMITS["clock"]["machine"]:
        return warn(f"{_off(ahead)} the hub's", _set_clock(system.name))
    for disk in (facts.disk, facts.cache):
        if disk.skew is not None and abs(disk.skew) > LIMITS["clock"]["file_server"]:
            return warn(
                f"{_off(disk.skew)} that of the file system at {disk.path}",
                "let this machine and the file server follow the same time server (NTP)",
            )
    agrees = ", agrees with the hub's" if ahead is not None else ""
    if system.synchronized is False:
        if facts.environment.get("SLURM_NNODES", "1") != "1":
            return warn(
                f"plausible{agrees}; the kernel does not know it to be synchronized",
                "run chrony or ntpd on every node, so that their logs can be compared",
            )
        return ok(f"plausible{agrees}; not known to the kernel to be synchronized")
    return ok(f"plausible{agrees}" + (", synchronized" if system.synchronized else ""))


def _set_clock(system: str) -> str:
    return "sudo sntp -sS time.apple.com" if system == "macOS" else "timedatectl set-ntp true"


def _off(ahead: float) -> str:
    """The error of this clock, if another one is so many seconds ahead."""
    return f"{abs(ahead):.0f} s {'behind' if ahead > 0 else 'ahead of'}"


def _disk(disk: Disk, elsewhere: str) -> Verdict:
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


def _compiler(facts: Facts) -> Verdict:
    compiler, gpus = facts.compiler, facts.hardware.gpus
    triton = f", Triton {compiler.triton}" if compiler.triton else ""
    if not compiler.cc:
        why = "kernels on a GPU need it" if gpus else "casts on a CPU take 2 to 4 times as long without it"
        return warn(
            f"{compiler.version or compiler.error or 'no C compiler'}{triton}",
            f"install gcc and g++, or clang, or name them in CC and CXX: {why}; training.compile needs both",
        )
    if not compiler.cxx:
        return warn(
            f"{compiler.error or 'no C++ compiler'}{triton}",
            "install g++ or clang++, or name one in CXX: training.compile needs it; nothing else does",
        )
    found = f"{compiler.version or compiler.cxx}{triton}"
    if compiler.error:
        return warn(f"{found}: {compiler.error}", _fix_of_compiler(compiler, facts.system.name))
    if gpus and not compiler.triton:
        return warn(
            f"{found}, no Triton", "pip install triton: kernels and training.compile need it on a GPU"
        )
    return ok(found)


def _fix_of_compiler(compiler: Compiler, system: str) -> str:
    if "Python.h" in compiler.error:
        return "install Python's headers (python3-dev or python3-devel): training.compile needs them"
    if re.search(r"openmp|omp\.h|lg?omp", compiler.error):
        how = "brew install libomp" if system == "macOS" else "libomp-dev, or take g++"
        return f"install OpenMP for this compiler ({how}): training.compile needs it"
    return "fix the compiler, or name another in CXX: training.compile needs one"


def _given(name: str, given: Given) -> Verdict:
    if given.error:
        return of_error("MISS", given.error, f"name another with --{name}")
    return ok(f"{given.name}: {given.found}")
