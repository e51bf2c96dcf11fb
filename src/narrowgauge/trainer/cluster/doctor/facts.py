"""The facts that `doctor` judges, as plain data, and the type of its verdicts.

`read.py` reads the facts off the machine. The checks turn them into verdicts and look at nothing else, so the
facts of any machine can be written down and judged, as the tests do.

Sizes are in bytes and times in seconds. An unknown number is None; an unknown word is "".
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.system.files import shipped_text

Version = tuple[int, ...]


class Gpu(NamedTuple):
    """A GPU that torch sees."""

    name: str
    maker: str = "nvidia"  # or "amd"
    capability: tuple[int, int] = (0, 0)  # of an NVIDIA GPU
    architecture: str = ""  # of an AMD GPU, such as "gfx90a"
    memory: int = 0
    used: int | None = None  # memory in use before the doctor touched it
    busy: int | None = None  # percent of recent time in which it computed, for any process
    processes: tuple[int, ...] = ()  # ids of the processes that use it, if the driver reports them
    peers: tuple[int, ...] = ()  # the other GPUs whose memory it reaches without going through the host
    uuid: str = ""


class Disk(NamedTuple):
    """A folder to write to, and the file system it is on."""

    path: str  # the folder, or the nearest one above it that exists
    kind: str = ""  # the file system, such as "ext4", "lustre"
    size: int = 0
    free: int = 0
    inodes: int | None = None  # None if the file system has no fixed number
    inodes_free: int | None = None
    speed: float | None = None  # bytes/s of writing and flushing one file
    skew: float | None = None  # seconds by which the file system's clock is ahead of the machine's
    error: str = ""  # why writing to it failed


class Hub(NamedTuple):
    """The outcome of a request to the Hugging Face hub, in words."""

    found: str
    fix: str = ""  # "" if the hub was reached, or was not to be asked
    ahead: float | None = None  # seconds by which the hub's clock is ahead of this machine's


class Verdict(NamedTuple):
    """The verdict on one item."""

    status: str  # OK, WARN (works, with limits) or MISS (fails, or is silently wrong)
    found: str  # what was found
    fix: str = ""  # what to do about it; "" if nothing needs fixing


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that the doctor examines."""

    python: Version  # of the running Python
    packages: Mapping[str, str]  # version of each package beside torch; "" if missing
    torch: str  # torch's version string; "" if torch is not installed
    torch_error: str = ""  # why importing torch fails
    build: str = ""  # torch's: "cpu", "cuda" or "rocm"; "" if unknown
    library: tuple[int, int] = (0, 0)  # the CUDA or ROCm version of the build
    needed_glibc: Version = ()  # the oldest glibc that the installed torch supports; () if unknown
    architectures: tuple[str, ...] = ()  # the GPUs it has code for: "sm_90", "compute_120", "gfx942"
    backends: tuple[str, ...] = ()  # the backends built into torch.distributed: "gloo", "nccl"
    nccl: Version = ()  # version of NCCL, or of RCCL on AMD

    makers: tuple[str, ...] = ()  # of each GPU with a device file for this process, seen by torch or not
    on_bus: tuple[str, ...] = ()  # of each GPU on the machine's PCI bus, usable by this process or not
    driver: str = ""  # version of the NVIDIA or AMD driver
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA that the NVIDIA driver supports
    capabilities: tuple[Version, ...] = ()  # of the NVIDIA GPUs, from the driver, without torch
    gpus: tuple[Gpu, ...] = ()  # those that torch sees
    gpu_error: str = ""  # torch's output if listing its GPUs failed
    links: tuple[str, ...] = ()  # the kinds of connection between two GPUs, such as "NV18", "PHB"
    fabric: bool = False  # whether the machine has InfiniBand or the like

    system: str  # the operating system: "Linux", "macOS", "Windows"
    machine: str  # the processor architecture: "x86_64", "aarch64"
    glibc: Version  # () for any other C library
    cpu: frozenset[str]  # the processor's instruction sets, by Linux's names; empty if unknown
    cores: int  # available to this process
    machine_cores: int
    threads: int | None  # $OMP_NUM_THREADS
    open_files: tuple[int | None, int | None]  # (soft, hard) limits; None: unlimited
    locked_memory: tuple[int | None, int | None]
    shared_memory: Disk | None  # /dev/shm; None if absent
    now: float  # seconds since 1970
    installed: float  # modification time of the newest file of this package
    synchronized: bool | None  # whether the kernel reports its clock as synchronized

    cc: str = ""  # the C compiler's path
    cxx: str = ""  # the C++ compiler's path
    compiler: str = ""  # the first line of its version
    compiler_error: str = ""  # why it does not compile a small program with Python's headers and OpenMP
    triton: str = ""  # version of Triton

    environment: Mapping[str, str]  # every variable: the code shared with `train` reads the launcher's
    disk: Disk  # of the working directory
    cache: Disk  # of the prepared-data cache
    hub: Hub
    wants_hub: bool = False  # whether the data that the user named come from the hub
    data: Verdict | None = None  # on what the user named, by the code that `train` uses
    tokenizer: Verdict | None = None

    @property
    def torch_works(self) -> bool:
        """Whether the rest of this package can be imported."""
        has_torch = not self.torch_error and release(self.torch) >= LIMITS["version"]["torch"]
        return has_torch and all(self.packages.values())


ok = partial(Verdict, "OK")  # needs no fix
warn = partial(Verdict, "WARN")  # works, but slower or less than it could, or only for some verbs
miss = partial(Verdict, "MISS")  # will fail or be silently wrong


def verdict_of(status: Callable[..., Verdict], error: object, otherwise: str) -> Verdict:
    """The verdict that repeats a `UserError`; its fix follows the last semicolon, else it is `otherwise`."""
    found, _, fix = str(error).rpartition("; ")
    return status(found or fix, fix if found else otherwise)


def dotted(version: Version) -> str:
    """A version in dotted notation: "12.9"."""
    return ".".join(map(str, version))


def release(version: str) -> tuple[int, int]:
    """The first two components of a version: (2, 11) of "2.11.0+cu128"; missing ones are 0."""
    major, minor, *_ = [*re.findall(r"\d+", version), "0", "0"]
    return int(major), int(minor)


def folder_of(name: str) -> Path | None:
    """The folder, or the file, from which a package would be imported; None if absent."""
    try:
        spec = find_spec({"nvidia-ml-py": "pynvml"}.get(name, name))
    except (ImportError, ValueError):  # an import hook may refuse the name
        return None
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else [None]
    return Path(places[0]) if places[0] else None


def count(number: int, thing: str) -> str:
    """A count with its noun: "1 GPU", "2 GPUs"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def figures(name: str) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file of the doctor, with versions as tuples."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        return tuple(map(plain, value)) if isinstance(value, list) else value

    tables: dict[str, dict[str, Any]] = plain(tomllib.loads(shipped_text("trainer/cluster/doctor", name)))
    return tables


LIMITS = figures("limits")  # the versions and bounds used by the verdicts
