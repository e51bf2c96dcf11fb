"""The doctor's verdicts on simulated machines: whole ones, and each with one thing wrong.

A machine is written down as the facts that would have been found there.
"""

import sys
from dataclasses import replace

import pytest

from narrowgauge.trainer.cluster.doctor.doctor import check
from narrowgauge.trainer.cluster.doctor.facts import Disk, Gpu, Hub, miss
from narrowgauge.trainer.cluster.doctor.fit import build_for
from narrowgauge.trainer.cluster.doctor.read import read_compilers
from support.healthy import CPU_ONLY

CUDA = {
    "torch": "2.11.0+cu128",
    "build": "cuda",
    "library": (12, 8),
    "architectures": ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    "backends": ("gloo", "nccl"),
    "nccl": (2, 27, 5),
}
CUDA_129 = CUDA | {"torch": "2.11.0+cu129", "library": (12, 9)}
ROCM = {
    "torch": "2.11.0+rocm7.0",
    "build": "rocm",
    "library": (7, 0),
    "architectures": ("gfx90a", "gfx942", "gfx950", "gfx1100"),
    "backends": ("gloo", "nccl"),
    "nccl": (2, 26, 6),
}
CPUS = {"torch": "2.11.0", "build": "cpu", "library": (0, 0), "architectures": (), "backends": ("gloo",)}
CUDART = "libcudart.so.13: cannot open shared object file: No such file or directory"
GLIBC = "/lib64/libm.so.6: version `GLIBC_2.27' not found (required by torch/lib/libtorch_cpu.so)"
HEADER = "Python.h: No such file or directory"
NO_TORCH = "No module named 'torch'"
GCC = {"cc": "/usr/bin/gcc", "cxx": "/usr/bin/g++", "compiler": "g++ (Ubuntu 13.2.0) 13.2.0"}
CXX = GCC | {"triton": "3.5.0"}


def node(gpu: Gpu, number: int, connected: bool = True) -> tuple[Gpu, ...]:
    """n GPUs of a kind, each of which reaches each other."""
    return tuple(
        gpu._replace(peers=tuple(j for j in range(number) if j != i) if connected else ())
        for i in range(number)
    )


RTX4090 = Gpu(name="NVIDIA GeForce RTX 4090", capability=(8, 9), memory=24 << 30, used=400 << 20, busy=2)
H100 = Gpu(name="NVIDIA H100 80GB HBM3", capability=(9, 0), memory=80 << 30, used=4 << 20, busy=0)
MI250X = Gpu(name="AMD Instinct MI250X", maker="amd", architecture="gfx90a", memory=64 << 30, used=1 << 20)

LAPTOP = replace(
    CPU_ONLY,
    **CUDA | CXX,
    makers=("nvidia",),
    on_bus=("nvidia",),
    driver="570.86.10",
    driver_cuda=(12, 8),
    gpus=(RTX4090,),
    disk=Disk(path="/home/me", kind="ext4", size=1 << 40, free=300 << 30, speed=2e9),
)
EIGHT_H100 = replace(
    CPU_ONLY,
    **CUDA_129 | CXX,
    makers=("nvidia",) * 8,
    on_bus=("nvidia",) * 8,
    driver="575.57.08",
    driver_cuda=(12, 9),
    gpus=node(H100, 8),
    links=("NV18",),
    fabric=True,
    cores=192,
    machine_cores=192,
)
FRONTIER = replace(  # one of 8 processes of a node, two nodes, as srun starts them
    CPU_ONLY,
    **ROCM | CXX,
    makers=("amd",) * 8,
    on_bus=("amd",) * 8,
    driver="6.8.5",
    gpus=node(MI250X, 8),
    cores=7,
    machine_cores=128,
    threads=7,
    environment={
        **{"SLURM_JOB_ID": "3", "SLURM_NTASKS": "16", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0"},
        **{"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"},
        **{"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "PMI_SIZE": "16", "PMI_RANK": "9"},
        **{"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"},
        **{"MASTER_ADDR": "frontier00001", "MASTER_PORT": "29500"},
    },
    disk=Disk(path="/lustre/me", kind="lustre", size=1 << 50, free=1 << 49, speed=8e8),
    hub=Hub("offline mode"),
)
V100 = replace(
    LAPTOP,
    torch="2.13.0+cu130",
    library=(13, 0),
    driver="550.54.15",
    driver_cuda=(12, 4),
    capabilities=((7, 0),),
    gpus=(),
)


def gpus(facts, **values):
    return replace(facts, gpus=tuple(gpu._replace(**values) for gpu in facts.gpus))


def host(**facts):
    return replace(CPU_ONLY, **facts)


def disk(**values):
    return host(disk=CPU_ONLY.disk._replace(**values))


def mac(**facts):
    return host(system="macOS", shared_memory=None, **facts)


def shared(size, free, error=""):
    """A host whose shared memory is of this size."""
    return host(shared_memory=Disk(path="/dev/shm", size=size, free=free, error=error))


def broken(facts, error=NO_TORCH, **other):
    """The machine with a torch that does not import, or that is not installed."""
    other |= {"torch": "", "build": ""} if error == NO_TORCH else {}
    return replace(facts, torch_error=error, backends=(), architectures=(), gpus=(), **other)


TORCH_AND_GPUS = "torch MISS, gpus MISS"
# A machine, what is wrong there as "item STATUS", and words of the findings and their fixes.
GPUS = [
    (replace(LAPTOP, **CPUS, gpus=()), TORCH_AND_GPUS, "built for CUDA 12.8"),
    (replace(FRONTIER, **CUDA, gpus=()), TORCH_AND_GPUS, "8 AMD GPUs", "built for ROCm"),
    (replace(LAPTOP, gpus=(), driver_cuda=(11, 2)), "driver MISS, gpus MISS", "525 or later"),
    (replace(LAPTOP, gpus=(), driver_cuda=None), "driver MISS, gpus MISS", "libcuda.so.1"),
    (replace(LAPTOP, gpus=(), environment={"CUDA_VISIBLE_DEVICES": ""}), "gpus WARN", "hides them"),
    (replace(LAPTOP, gpus=(), makers=(), driver_cuda=None), "gpus WARN", "--gpus all"),
    (gpus(LAPTOP, capability=(6, 1)), "gpus MISS", "built for CUDA 12.6", "compute capability 6.1"),
    (
        replace(EIGHT_H100, gpus=(*node(H100, 7), RTX4090._replace(peers=tuple(range(7))))),
        *("gpus WARN, peers WARN", "7 x NVIDIA H100", "choose GPUs of one kind"),
    ),
    (
        replace(LAPTOP, makers=("nvidia",) * 2, gpus=node(RTX4090, 2, connected=False)),
        *("peers WARN", "1 of 1 pairs of GPUs, such as 0 and 1"),
    ),
    (replace(EIGHT_H100, nccl=(2, 21, 5)), "nccl WARN", "NCCL 2.24 or later"),
    (replace(EIGHT_H100, backends=("gloo",)), "nccl MISS", "none (built in: gloo)"),
    (gpus(LAPTOP, used=20 << 30, processes=(4711,), busy=97), "gpu-jobs WARN", "process 4711, 97 % busy"),
    (replace(EIGHT_H100, **CUDA), "recipes WARN", "fp8-block", "12.9"),
    (replace(EIGHT_H100, cc=""), "compiler WARN", "kernels on a GPU need it"),
]
TORCH = [
    (V100, "driver MISS, gpus MISS", "for CUDA up to 12.4", "torch 2.11 to 2.14, built for CUDA 12.6"),
    (broken(LAPTOP), TORCH_AND_GPUS, "install torch 2.11, built for CUDA 12.8"),
    (broken(LAPTOP, CUDART), TORCH_AND_GPUS, "it does not import: libcudart.so.13", "with its dependencies"),
    (
        broken(host(glibc=(2, 17)), GLIBC, torch="2.13.0", needed_glibc=(2, 28)),
        *("system MISS, torch MISS", "torch 2.13.0 needs glibc 2.28", "it was built for glibc 2.27"),
    ),
    (broken(host(glibc=())), "system MISS, torch MISS", "a C library other than glibc"),
    (broken(host(cpu={"sse4_2"}), "SIGILL"), "system WARN, torch MISS", "a machine with AVX2"),
    (broken(CPU_ONLY, python=(3, 16, 0)), "python WARN, torch MISS", "install Python 3.11 to 3.15"),
    (broken(CPU_ONLY, "undefined symbol: ncclCommShrink"), "torch MISS", "another NCCL"),
    (host(python=(3, 10, 4), torch="2.6.0"), "python MISS, torch MISS", "Python 3.11"),
]
HOST = [
    (host(system="Windows", machine="AMD64", glibc=()), "system WARN", "use WSL 2"),
    (mac(), "system WARN", "macOS"),
    (mac(compiler_error="unsupported option '-fopenmp'"), "system WARN, compiler WARN", "libomp"),
    (host(packages={"numpy": "1.24.4", "pydantic": ""}), "packages MISS", "install pydantic"),
    (host(open_files=(1024, 1 << 20)), "open-files WARN", "ulimit -n 65536"),
    (shared(64 << 20, 64 << 20), "shared-memory WARN", "--shm-size"),
    (shared(32 << 30, 64 << 20), "shared-memory WARN", "killed programs"),
    (host(locked_memory=(8 << 20, None), fabric=True), "locked-memory WARN", "-l"),
    (host(now=0.0), "clock MISS", "timedatectl"),
    (host(hub=Hub("reached", ahead=4000.0)), "clock WARN", "4000 s behind the hub's"),
    (disk(skew=-60.0), "clock WARN", "60 s ahead of that of the file system"),
    (host(synchronized=False, environment={"SLURM_NNODES": "2"}), "clock WARN", "chrony"),
    (disk(free=100 << 20), "disk MISS", "100.0 MiB free"),
    (disk(inodes=10**6, inodes_free=12), "disk MISS", "12 inodes free"),
    (disk(speed=9e6, kind="nfs4"), "disk WARN", "(nfs4)"),
    (disk(error="Read-only file system"), "disk WARN", "--out"),
    (host(cc="", cxx="", compiler=""), "compiler WARN", "casts on a CPU take 2 to 4 times as long"),
    (host(compiler_error=f"program.cpp:1:10: fatal error: {HEADER}"), "compiler WARN", "python3-dev"),
    (host(data=miss("data source 'x' does not exist", "name another")), "data MISS", "'x'"),
    (host(tokenizer=miss("tokenizer file 't' is damaged", "name another")), "tokenizer MISS", "'t'"),
]
WHOLE = [(CPU_ONLY, ""), (LAPTOP, ""), (EIGHT_H100, ""), (FRONTIER, "")]
WHOLE += [(host(**GCC), "")]  # which a CPU does not need


@pytest.mark.parametrize("case", [*WHOLE, *GPUS, *TORCH, *HOST], ids=lambda case: "; ".join(case[1:])[:60])
def test_what_is_wrong_is_found_with_a_way_out_and_nothing_else(case):
    facts, wrong, *words = case
    verdicts = check(facts)
    found = [f"{item} {verdict.status}" for item, verdict in verdicts.items() if verdict.status != "OK"]
    assert ", ".join(found) == wrong
    for verdict in verdicts.values():
        assert verdict.found
        assert bool(verdict.fix) == (verdict.status != "OK"), verdict
    said = " ".join(f"{verdict.found} {verdict.fix}" for verdict in verdicts.values())
    assert [word for word in words if word not in said] == []
    assert ("recipes" in verdicts) <= (not facts.torch_error), "they need a torch that fits"
    assert "recipes" in verdicts or {"torch MISS", "packages MISS"} & set(found)


def test_the_network_is_needed_for_the_hub_alone():
    facts = host(hub=Hub("no way to huggingface.co", "ask for a way out"))
    assert check(facts)["network"] == ("WARN", "no way to huggingface.co", "ask for a way out")
    assert check(replace(facts, wants_hub=True))["network"].status == "MISS"


def test_which_build_of_torch():
    """By compute capability and the driver's CUDA; an older CUDA runs on a newer driver."""
    old, new = "torch 2.11 to 2.14, built for CUDA 12.6", "torch 2.11, built for CUDA 12.8"
    builds = {
        ((7, 0), None): old,  # V100
        ((5, 2), (13, 0)): old,
        ((7, 5), (12, 2)): old,  # T4: 12.6 runs on any driver of CUDA 12
        ((9, 0), (13, 2)): "torch 2.12 or later, built for CUDA 13.2",
        ((10, 0), (12, 8)): new,
        ((10, 0), (12, 6)): new,
        ((3, 7), None): "",
        ((8, 0), (11, 4)): "",
    }
    assert {key: build_for(*key) for key in builds} == builds


def test_what_is_not_there_is_not_judged():
    assert not set(check(CPU_ONLY)) & {"peers", "gpu-jobs", "data", "tokenizer"}
    assert "NV18" in check(EIGHT_H100)["peers"].found
    assert check(gpus(LAPTOP, used=None, busy=None))["gpu-jobs"].found.startswith("unknown")
    assert "mxfp4" in check(CPU_ONLY)["recipes"].found.partition("; emulated: ")[2]
    rocm = check(replace(FRONTIER, triton=""))["compiler"]
    assert "pip install triton" not in rocm.fix, "the Triton of NVIDIA's GPUs is not put over ROCm's"


def test_triton_is_found_by_the_name_it_is_imported_by(tmp_path, monkeypatch):
    """ROCm's wheels bring `triton` in packages of other names."""
    (tmp_path / "triton_rocm-3.6.0.dist-info").mkdir()
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("__version__ = '3.4.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert read_compilers()["triton"] == "3.4.0"
