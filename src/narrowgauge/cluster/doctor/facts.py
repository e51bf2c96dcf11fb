"""What is a machine, to somebody who wants to train on it? The facts that `doctor` judges, as plain data.

`doctor_gather` reads them off the machine; the `doctor_judge_*` files turn them into verdicts and look at
nothing else. So a machine that nobody has at hand can be written down and judged, and the tests do so.

Sizes are bytes and times are seconds. A number that could not be found out is None; a word, "".
"""

from dataclasses import dataclass, field

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What is installed: Python, torch and what torch was built with.

    Attributes:
        python: version of the running Python.
        torch: version of torch as it calls itself.
        build: "cpu", "cuda" or "rocm".
        library: version of the CUDA or ROCm of the build.
        architectures: the GPUs it has code for, such as "sm_90", "compute_120", "gfx942"; empty if not known.
        backends: of torch.distributed that are built in: "gloo", "nccl".
        nccl: version of NCCL, or of RCCL on AMD.
    """

    python: Version = (3, 12, 0)
    torch: str = "2.11.0"
    build: str = "cpu"
    library: tuple[int, int] = (0, 0)
    architectures: tuple[str, ...] = ()
    backends: tuple[str, ...] = ("gloo",)
    nccl: Version = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that torch sees.

    Attributes:
        maker: "nvidia" or "amd".
        capability: of an NVIDIA GPU.
        architecture: of an AMD GPU, such as "gfx90a".
        used: memory in use before the doctor touched it.
        busy: percent of the last moments in which it computed, for whomever.
        processes: (process id, bytes or None) of those that hold it, if the driver tells.
        peers: the other GPUs whose memory it reaches without the host.
    """

    name: str
    maker: str = "nvidia"
    capability: tuple[int, int] = (0, 0)
    architecture: str = ""
    memory: int = 0
    used: int | None = None
    busy: int | None = None
    processes: tuple[tuple[int, int | None], ...] = ()
    peers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The GPUs as the kernel, the driver and torch see them.

    Attributes:
        makers: of each GPU that this process has a device file for, whatever torch thinks of it.
        on_bus: of each GPU on the machine's PCI bus, whoever may use it.
        driver: version of the NVIDIA or AMD driver.
        driver_cuda: the newest CUDA that the NVIDIA driver knows.
        gpus: those that torch sees.
        error: what torch said when it was asked for them, if it was not an answer.
        links: kinds of connection between two GPUs, such as "NV18", "PHB", by pair.
        fabric: whether the machine has InfiniBand or the like.
    """

    makers: tuple[str, ...] = ()
    on_bus: tuple[str, ...] = ()
    driver: str = ""
    driver_cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    error: str = ""
    links: tuple[tuple[int, int, str], ...] = ()
    fabric: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A folder to write to, and the file system it is on.

    Attributes:
        path: the folder, or the nearest above it that exists.
        kind: the file system, such as "ext4", "lustre".
        inodes, inodes_free: None where the file system has no fixed number.
        speed: bytes a second of one file written and flushed.
        skew: seconds by which the file system's clock is ahead of the machine's.
        error: why it could not be written to.
    """

    path: str
    kind: str = ""
    size: int = 0
    free: int = 0
    inodes: int | None = None
    inodes_free: int | None = None
    speed: float | None = None
    skew: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """What came of asking the Hugging Face hub for an answer.

    Attributes:
        host: whom was asked.
        proxy: whom the question went through, without user and password.
        outcome: "reached", "offline" (not asked: the user wants it so), "proxy refused", "proxy unreachable",
            "no name", "no network", "certificate", "refused", "no answer", or "not asked".
        status: the HTTP status, of the proxy where it is the one that refused.
        ahead: seconds by which the hub's clock is ahead of ours.
        detail: the error in the system's words.
    """

    host: str = "huggingface.co"
    proxy: str = ""
    outcome: str = "reached"
    status: int | None = None
    ahead: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Data or a tokenizer that the user named: what it is, or what is wrong with it."""

    name: str
    found: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """What compiles code at run time.

    Attributes:
        cxx: the C++ compiler's path.
        version: its first line.
        error: what went wrong with a small program that uses Python's headers and OpenMP.
        triton: version of Triton.
    """

    cxx: str = ""
    version: str = ""
    error: str = ""
    triton: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Limits of the process and of the machine.

    Attributes:
        cores: that this process may use; `machine_cores`: that there are.
        threads: $OMP_NUM_THREADS.
        open_files, locked_memory: (soft, hard) limits; None: unlimited.
        linux: whether it is Linux, where shared memory is the file system /dev/shm.
        shm_size, shm_free: of /dev/shm; None: there is none. `shm_error`: why it cannot be written to.
        now: seconds since 1970; `installed`: when the newest file of this package was written.
        synchronized: whether the kernel says that its clock follows another.
    """

    cores: int = 8
    machine_cores: int = 8
    threads: int | None = None
    open_files: tuple[int | None, int | None] = (1 << 20, 1 << 20)
    locked_memory: tuple[int | None, int | None] = (None, None)
    linux: bool = True
    shm_size: int | None = 32 << 30
    shm_free: int | None = 32 << 30
    shm_error: str = ""
    now: float = 1.8e9
    installed: float = 1.7e9
    synchronized: bool | None = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that the doctor looks at.

    `environment` holds every variable of the process, for `train` reads the launcher's from there, too.
    """

    software: Software = Software()
    hardware: Hardware = Hardware()
    system: System = System()
    environment: dict[str, str] = field(default_factory=dict)
    disk: Disk = Disk(path=".", size=1 << 40, free=1 << 39, speed=1e9)
    cache: Disk = Disk(path="cache", size=1 << 40, free=1 << 39, speed=1e9)
    hub: Hub = Hub()
    data: Given | None = None
    tokenizer: Given | None = None
    compiler: Compiler = Compiler(cxx="/usr/bin/g++", version="g++ 13.2.0")


@dataclass(frozen=True, slots=True)
class Item:
    """A verdict: `status` is OK, WARN (works, but) or MISS (will not work, or silently wrong).

    `found` is what there is; `fix`, empty if nothing is to be fixed, what to do about it.
    """

    item: str
    status: str
    found: str
    fix: str = ""


def ok(item: str, found: str) -> Item:
    """Nothing to fix."""
    return Item(item, "OK", found)


def warn(item: str, found: str, fix: str) -> Item:
    """It works, but slower or less than it could, or only for some of the verbs."""
    return Item(item, "WARN", found, fix)


def miss(item: str, found: str, fix: str) -> Item:
    """It will not work, or it would be silently wrong."""
    return Item(item, "MISS", found, fix)


def of_error(status: str, item: str, sentence: str, otherwise: str) -> Item:
    """The verdict that repeats a `UserError`, whose way out stands behind its last semicolon.

    Args:
        status: WARN or MISS.
        item: what is judged.
        sentence: the error's text.
        otherwise: the fix where the sentence names no way out.
    """
    found, _, fix = sentence.rpartition("; ")
    return Item(item, status, found or fix, fix if found else otherwise)


def dotted(version: Version) -> str:
    """A version as it is written: "12.9"."""
    return ".".join(map(str, version))
