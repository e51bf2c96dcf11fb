"""The facts that `doctor` judges about a machine, as plain data, and the form of its verdicts.

The functions `collect_*` read the facts off the machine. The functions `check_*` turn them into verdicts and
look at nothing else, so that the facts of any machine can be written down and judged, as the tests do.

Sizes are bytes and times are seconds. A number that could not be found out is None; a word is "".
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NamedTuple

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Python, torch and what torch was built with."""

    python: Version  # of the running Python
    torch: str  # torch's version, as it writes it; "" if there is none
    error: str = ""  # why torch does not import
    glibc: Version = ()  # the oldest glibc that the installed torch runs with; () if not known
    packages: Mapping[str, str] = field(default_factory=dict)  # version of each other package; "" if missing
    build: str  # "cpu", "cuda" or "rocm"; "" if not known
    library: tuple[int, int]  # version of the CUDA or ROCm of the build
    architectures: tuple[
        str, ...
    ]  # the GPUs it has code for: "sm_90", "compute_120", "gfx942"; () if not known
    backends: tuple[str, ...]  # the backends of torch.distributed that are built in: "gloo", "nccl"
    nccl: Version  # version of NCCL, or of RCCL on AMD

    @property
    def works(self) -> bool:
        """Whether the rest of this package can be imported."""
        has_torch = not self.error and release(self.torch) >= LIMITS["version"]["torch"]
        return has_torch and all(self.packages.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that torch sees."""

    name: str
    maker: str = "nvidia"  # or "amd"
    capability: tuple[int, int] = (0, 0)  # of an NVIDIA GPU
    architecture: str = ""  # of an AMD GPU, such as "gfx90a"
    memory: int = 0
    used: int | None = None  # memory in use before the doctor touched it
    busy: int | None = None  # percent of the last moments in which it computed, for whomever
    processes: tuple[int, ...] = ()  # ids of the processes that hold it, if the driver tells
    peers: tuple[int, ...] = ()  # the other GPUs whose memory it reaches without the host


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The GPUs as the kernel, the driver and torch see them."""

    makers: tuple[str, ...] = ()  # of each GPU that this process has a device file for, whatever torch thinks
    on_bus: tuple[str, ...] = ()  # of each GPU on the machine's PCI bus, whoever may use it
    driver: str = ""  # version of the NVIDIA or AMD driver
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA that the NVIDIA driver knows
    capabilities: tuple[Version, ...] = ()  # of the NVIDIA GPUs, as the driver tells them without torch
    gpus: tuple[Gpu, ...] = ()  # those that torch sees
    error: str = ""  # what torch said when it was asked for them, if it was not an answer
    links: tuple[str, ...] = ()  # the kinds of connection between two GPUs, such as "NV18", "PHB"
    fabric: bool = False  # whether the machine has InfiniBand or the like


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A folder to write to, and the file system it is on."""

    path: str  # the folder, or the nearest one above it that exists
    kind: str = ""  # the file system, such as "ext4", "lustre"
    size: int = 0
    free: int = 0
    inodes: int | None = None  # None where the file system has no fixed number
    inodes_free: int | None = None
    speed: float | None = None  # bytes a second of one file written and flushed
    skew: float | None = None  # seconds by which the file system's clock is ahead of the machine's
    error: str = ""  # why it could not be written to


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """The outcome of a request to the Hugging Face hub.

    Attributes:
        outcome: "reached", "offline" (not asked: the user wants it so), "proxy refused", "proxy unreachable",
            "no name", "no network", "certificate", "refused", "no answer", or "not asked".
    """

    outcome: str
    host: str = "huggingface.co"
    proxy: str = ""  # the proxy of the request, without user and password
    status: int | None = None  # the HTTP status, of the proxy where it is the one that refused
    ahead: float | None = None  # seconds by which the hub's clock is ahead of ours
    detail: str = ""  # the error in the system's words


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Data or a tokenizer that the user named: what it is, or what is wrong with it."""

    name: str
    found: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """The compilers of code at run time."""

    cc: str = ""  # the C compiler's path
    cxx: str = ""  # the C++ compiler's path
    version: str = ""  # its first line
    error: str = ""  # what went wrong with a small program that uses Python's headers and OpenMP
    triton: str = ""  # version of Triton


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Limits of the process and of the machine."""

    cores: int  # that this process may use
    machine_cores: int
    threads: int | None  # $OMP_NUM_THREADS
    open_files: tuple[int | None, int | None]  # (soft, hard) limits; None: unlimited
    locked_memory: tuple[int | None, int | None]
    name: str  # of the operating system: "Linux", "macOS", "Windows"
    machine: str  # the processor's kind: "x86_64", "aarch64"
    glibc: Version  # () where the C library is another one
    cpu: frozenset[str]  # the processor's instruction sets, as Linux names them; empty if not known
    shared_memory: Disk | None  # /dev/shm; None: there is none
    now: float  # seconds since 1970
    installed: float  # when the newest file of this package was written
    synchronized: bool | None  # whether the kernel says that its clock follows another


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that the doctor looks at."""

    software: Software
    hardware: Hardware
    system: System
    environment: Mapping[
        str, str
    ]  # every variable: the launcher's are read from it by the code that train has
    disk: Disk  # of the working directory
    cache: Disk  # of the cache of prepared data
    hub: Hub
    data: Given | None
    tokenizer: Given | None
    compiler: Compiler


class Verdict(NamedTuple):
    """The verdict on one item."""

    status: str  # OK, WARN (works, but) or MISS (will not work, or silently wrong)
    found: str  # what there is
    fix: str = ""  # what to do about it; "" if nothing is to be fixed


def ok(found: str) -> Verdict:
    """Nothing is to be fixed."""
    return Verdict("OK", found)


def warn(found: str, fix: str) -> Verdict:
    """It works, but slower or less than it could, or only for some of the verbs."""
    return Verdict("WARN", found, fix)


def miss(found: str, fix: str) -> Verdict:
    """It will not work, or it would be silently wrong."""
    return Verdict("MISS", found, fix)


def of_error(status: str, sentence: str, otherwise: str) -> Verdict:
    """The verdict that repeats a `UserError`, with the fix after its last semicolon, or `otherwise`."""
    found, _, fix = sentence.rpartition("; ")
    return Verdict(status, found or fix, fix if found else otherwise)


def dotted(version: Version) -> str:
    """A version as it is written: "12.9"."""
    return ".".join(map(str, version))


def release(version: str) -> tuple[int, int]:
    """The first two numbers of a version: (2, 11) of "2.11.0+cu128"; zeros for what is missing."""
    major, minor, *_ = [*re.findall(r"\d+", version), "0", "0"]
    return int(major), int(minor)


def count(number: int, thing: str) -> str:
    """A number of things: "1 GPU", "2 GPUs"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _limits() -> dict[str, dict[str, Any]]:
    """The tables of `limits.toml`, its versions as tuples."""
    text = (resources.files("narrowgauge.cluster.doctor") / "limits.toml").read_text(encoding="utf-8")
    return {
        name: {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
        for name, table in tomllib.loads(text).items()
    }


LIMITS = _limits()  # the versions and bounds that the verdicts refer to
