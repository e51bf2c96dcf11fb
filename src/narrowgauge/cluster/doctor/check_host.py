"""Will the machine around the GPUs hold? Verdicts on limits, shared memory, clock, disks, compiler and files.

Where a bound is a number it is a judgement, and stands here with its reason:

| what                  | bound         | because                                                          |
|-----------------------|---------------|------------------------------------------------------------------|
| open files            | 4096          | shards of a corpus, sockets to each other process; 1024 is usual |
| shared memory         | 1 GiB, 16 MiB | processes hand batches and gradients over in it, and a container |
|                       |               | gets 64 MiB; below the second, NCCL does not start               |
| free disk             | 10 GiB, 1 GiB | a few checkpoints of a small model, or none                      |
| a disk that is full   | 90 %, 100 GiB | file systems get slow, and quotas strike                         |
| inodes                | 5 %, 1000     | a corpus or a checkpoint is many files                           |
| disk speed            | 50 MB/s       | a checkpoint of 124 M parameters would take half a minute        |
| a clock that is off   | 5 minutes     | certificates are refused                                         |
| a file server's clock | 5 seconds     | "newest" then names the wrong file                               |
"""

import re

from narrowgauge.cluster.doctor.facts import Compiler, Disk, Facts, Given, Item, miss, of_error, ok, warn
from narrowgauge.units import human_bytes

_FILES = 4096
_SHARED, _SHARED_LEAST = 1 << 30, 16 << 20
_FREE, _FREE_LEAST = 10 << 30, 1 << 30
_FULL, _PLENTY = 0.9, 100 << 30
_INODES_LEAST, _INODES_SHARE = 1000, 0.05
_SLOW = 50e6
_CLOCK_OFF, _FILE_CLOCK_OFF = 300.0, 5.0


def check_host(facts: Facts) -> list[Item]:
    """The items of this file."""
    items = [_open_files(facts), _locked_memory(facts), _shared_memory(facts), _clock(facts)]
    items.append(_disk("disk", facts.disk, "go to another folder, or name one with --out"))
    items.append(_disk("cache", facts.cache, "name another folder in NARROWGAUGE_CACHE"))
    items.append(_compiler(facts))
    for name, given in (("data", facts.data), ("tokenizer", facts.tokenizer)):
        if given:
            items.append(_given(name, given))
    return items


def _open_files(facts: Facts) -> Item:
    soft, hard = facts.system.open_files
    if soft is None or soft >= _FILES:
        return ok("open-files", "unlimited" if soft is None else f"{soft:,}")
    if hard is None or hard >= _FILES:
        return warn("open-files", f"{soft:,}", f"ulimit -n {min(hard or 65536, 65536)}")
    return warn(
        "open-files",
        f"{soft:,}, and the user may not raise it beyond {hard:,}",
        "let the administrator raise nofile in /etc/security/limits.conf (docker run --ulimit nofile=65536)",
    )


def _locked_memory(facts: Facts) -> Item:
    soft = facts.system.locked_memory[0]
    if soft is None:
        return ok("locked-memory", "unlimited")
    if facts.hardware.fabric:
        return warn(
            "locked-memory",
            f"{human_bytes(soft)}, and the machine has InfiniBand, whose buffers are locked",
            "ulimit -l unlimited, or memlock in /etc/security/limits.conf (docker run --ulimit memlock=-1); "
            "under Slurm, PropagateResourceLimitsExcept=MEMLOCK",
        )
    return ok("locked-memory", f"{human_bytes(soft)}; only InfiniBand needs more, and there is none")


def _shared_memory(facts: Facts) -> Item:
    system = facts.system
    fix = "docker run --shm-size 16g, or --ipc host; else mount -o remount,size=16G /dev/shm"
    if not system.linux:
        return ok("shared-memory", "not a file system here")
    if system.shm_size is None or system.shm_free is None:
        return warn(
            "shared-memory", "there is no /dev/shm", "mount a tmpfs there: mount -t tmpfs tmpfs /dev/shm"
        )
    found = f"{human_bytes(system.shm_free)} free of {human_bytes(system.shm_size)} in /dev/shm"
    if system.shm_error:
        return miss("shared-memory", f"{found}: {system.shm_error}", "chmod 1777 /dev/shm")
    if system.shm_free >= _SHARED:
        return ok("shared-memory", found)
    status = miss if system.shm_free < _SHARED_LEAST else warn
    if system.shm_size >= _SHARED:
        fix = "remove what killed programs left there"
    return status("shared-memory", found, fix)


def _clock(facts: Facts) -> Item:
    system = facts.system
    if system.now < system.installed - 86400:  # a day: wheels carry local times
        return miss(
            "clock",
            "before the day this package was installed",
            "set the clock (timedatectl set-ntp true): certificates and 'newest' depend on it",
        )
    ahead = facts.hub.ahead
    if ahead is not None and abs(ahead) > _CLOCK_OFF:
        way = "behind" if ahead > 0 else "ahead of"
        return warn("clock", f"{abs(ahead):.0f} s {way} the hub's", "timedatectl set-ntp true")
    for disk in (facts.disk, facts.cache):
        if disk.skew is not None and abs(disk.skew) > _FILE_CLOCK_OFF:
            way = "behind" if disk.skew > 0 else "ahead of"
            return warn(
                "clock",
                f"{abs(disk.skew):.0f} s {way} that of the file system at {disk.path}",
                "let this machine and the file server follow the same time server (NTP)",
            )
    agrees = ", agrees with the hub's" if ahead is not None else ""
    if system.synchronized is False:
        if int(facts.environment.get("SLURM_NNODES", "1") or 1) > 1:
            return warn(
                "clock",
                f"plausible{agrees}; the kernel does not know it to be synchronized",
                "run chrony or ntpd on every node, so that their logs can be compared",
            )
        return ok("clock", f"plausible{agrees}; not known to the kernel to be synchronized")
    return ok("clock", f"plausible{agrees}" + (", synchronized" if system.synchronized else ""))


def _disk(item: str, disk: Disk, elsewhere: str) -> Item:
    kind = f" ({disk.kind})" if disk.kind else ""
    if disk.error:
        return warn(item, f"{disk.path}{kind}: {disk.error}", elsewhere)
    found = f"{disk.path}{kind}: {human_bytes(disk.free)} free of {human_bytes(disk.size)}"
    if disk.speed:
        found += f", writes {disk.speed / 1e6:,.0f} MB/s"
    if disk.inodes and disk.inodes_free is not None:
        share = disk.inodes_free / disk.inodes
        if disk.inodes_free < _INODES_LEAST:
            return miss(
                item, f"{found}, {disk.inodes_free} inodes free", f"remove small files, or {elsewhere}"
            )
        if share < _INODES_SHARE:
            return warn(
                item, f"{found}, {share:.1%} of the inodes free", f"remove small files, or {elsewhere}"
            )
    if disk.free < _FREE_LEAST:
        return miss(item, found, f"make room, or {elsewhere}")
    if disk.free < _FREE or disk.free < min(_PLENTY, (1 - _FULL) * disk.size):
        return warn(item, found, f"make room, or {elsewhere}")
    if disk.speed and disk.speed < _SLOW:
        return warn(item, found, f"{elsewhere} (a faster file system): every save waits for this one")
    return ok(item, found)


def _compiler(facts: Facts) -> Item:
    compiler, gpus = facts.compiler, facts.hardware.gpus
    triton = f", Triton {compiler.triton}" if compiler.triton else ""
    if not compiler.cxx:
        return warn(
            "compiler",
            f"{compiler.error or 'no C++ compiler'}{triton}",
            "install g++ or clang++, or name one in CXX: training.compile needs it; nothing else does",
        )
    found = f"{compiler.version or compiler.cxx}{triton}"
    if compiler.error:
        return warn("compiler", f"{found}: {compiler.error}", _fix_of_compiler(compiler))
    if gpus and not compiler.triton:
        return warn(
            "compiler", f"{found}, no Triton", "pip install triton: training.compile needs it on a GPU"
        )
    return ok("compiler", found)


def _fix_of_compiler(compiler: Compiler) -> str:
    if "Python.h" in compiler.error:
        return "install Python's headers (python3-dev or python3-devel): training.compile needs them"
    if re.search(r"openmp|omp\.h|lg?omp", compiler.error):
        return "install OpenMP for this compiler (libomp-dev, or take g++): training.compile needs it"
    return "fix the compiler, or name another in CXX: training.compile needs one"


def _given(item: str, given: Given) -> Item:
    if given.error:
        return of_error("MISS", item, given.error, f"name another with --{item}")
    return ok(item, f"{given.name}: {given.found}")
