"""Processes with and without a common world: the doctor reports on them what `train` reports."""

from dataclasses import replace

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.cluster.doctor.doctor import check
from narrowgauge.trainer.cluster.doctor.facts import Gpu
from narrowgauge.trainer.distributed import NotStartedBySrun, world_from
from support.healthy import CPU_ONLY
from support.launch_environments import DEVICES, REFUSED, WORLDS, env

ONE_NODE = "RANK=3 WORLD_SIZE=8 LOCAL_RANK=3 LOCAL_WORLD_SIZE=8 MASTER_ADDR=node1 MASTER_PORT=29500"
SHELL = "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_NNODES=1 SLURM_PROCID=0 ENVIRONMENT=BATCH"
STEP = (
    f"{SHELL} SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=8 "
    "SLURM_PROCID=3 SLURM_LOCALID=3 PMI_SIZE=8 PMI_RANK=3"
)
TWO_NODES = (
    f"{STEP} SLURM_NNODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=1(x2) "
    "SLURM_PROCID=1 SLURM_NODEID=1 SLURM_LOCALID=0 PMI_SIZE=2 PMI_RANK=1"
)
TORCHRUNS = (
    f"{TWO_NODES} {ONE_NODE} RANK=11 WORLD_SIZE=16 GROUP_RANK=1 GROUP_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=7"
)
EIGHT_BY_MPIRUN = (
    "OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=8"
)
ALL = [
    *(text for text, _ in WORLDS),
    *(text for text, _ in REFUSED),
    *(text for text, _, _ in DEVICES),
    *(f"{STEP} {ONE_NODE} WORLD_SIZE=5", f"{STEP} {ONE_NODE} TORCHELASTIC_RUN_ID=7"),
    *(f"{ONE_NODE} LOCAL_RANK=9", f"{ONE_NODE} MASTER_PORT=0"),
    *(ONE_NODE, SHELL, STEP, TWO_NODES, TORCHRUNS, EIGHT_BY_MPIRUN),
]


def verdicts(text, gpus=8, there=8, **system):
    """{item: verdict} of a process with these variables, which sees n of the GPUs that are there."""
    cards = tuple(Gpu(name="GPU", capability=(9, 0), peers=tuple(range(gpus))) for _ in range(gpus))
    system = {"cores": 64, "machine_cores": 64} | system
    return check(replace(CPU_ONLY, makers=("nvidia",) * there, gpus=cards, environment=env(text), **system))


def verdict(name, text, gpus=8, there=8, **system):
    return verdicts(text, gpus, there, **system)[name]


def train_says(text, gpus):
    """(the verdict that `train` gives by starting or not, its sentence)."""
    try:
        world_from(env(text), gpus)
    except UserError as error:
        return "WARN" if isinstance(error, NotStartedBySrun) else "MISS", str(error)
    return "OK", ""


@pytest.mark.parametrize("text", dict.fromkeys(ALL))
def test_the_doctor_refuses_what_train_refuses_and_nothing_else(text):
    """In the sentence of `train`, with its way out, wherever processes see 0 to 8 GPUs."""
    for gpus in (0, 1, 2, 4, 8):
        found = verdicts(text, gpus, gpus)
        said = [verdict for item, verdict in found.items() if item in ("launcher", "ranks")]
        status, sentence = train_says(text, gpus)
        if status == "OK":
            assert (len(said), said[0].status) == (2, "OK")
            assert said[1].status != "MISS"
        else:
            assert said[-1].status == status
            assert f"{said[-1].found}; {said[-1].fix}" == sentence
            assert said[-1].found
            assert said[-1].fix
            assert all(item.status == "OK" for item in said[:-1])


def test_the_shell_of_a_batch_script_is_where_the_doctor_is_started():
    item = verdict("launcher", SHELL)
    assert item.status == "WARN"
    assert "the Slurm job has 8 tasks, but this process was started by its script without srun" in item.found
    assert item.fix == "write srun and torchrun before the command, or use narrowgauge launch"
    assert verdict("launcher", f"{SHELL} SLURM_NTASKS=1").status == "OK"


@pytest.mark.parametrize(
    ("text", "gpus", "there", "status", "words"),
    [
        ("", 0, 0, "OK", "1 on this node, on the CPU"),
        ("", 8, 8, "OK", "one of 8 GPUs"),
        (ONE_NODE, 8, 8, "OK", "8 on this node, one to each GPU"),
        (ONE_NODE, 1, 1, "MISS", "8 processes on this node would share 1 GPU"),
        (f"{ONE_NODE} CUDA_VISIBLE_DEVICES=3", 1, 8, "OK", "given a GPU to itself"),
        (f"{ONE_NODE} LOCAL_WORLD_SIZE=4", 8, 8, "WARN", "4 on this node, 8 GPUs"),
    ],
)
def test_processes_and_gpus(text, gpus, there, status, words):
    item = verdict("ranks", text, gpus, there)
    assert item.status == status
    assert words in f"{item.found}; {item.fix}"


@pytest.mark.parametrize(
    ("text", "system", "status", "words"),
    [
        (ONE_NODE, {"cores": 64, "threads": 8}, "OK", "64 of 64"),
        (f"{STEP} {ONE_NODE}", {"cores": 1}, "WARN", "--cpus-per-task"),
        (ONE_NODE, {"cores": 64, "threads": 64}, "WARN", "OMP_NUM_THREADS=8"),
        # a container with a share of the cores
        ("", {"cores": 4, "threads": 16}, "WARN", "4 of 64; 1 process of OMP_NUM_THREADS=16"),
        ("", {"cores": 4, "threads": 16}, "WARN", "OMP_NUM_THREADS=4:"),
    ],
)
def test_cores(text, system, status, words):
    item = verdict("cores", text, **system)
    assert item.status == status
    assert words in f"{item.found} {item.fix}"
