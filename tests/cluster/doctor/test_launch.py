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
ALL = [
    *(text for text, *_ in [*WORLDS, *REFUSED, *DEVICES]),
    *(f"{STEP} {ONE_NODE} WORLD_SIZE=5", f"{STEP} {ONE_NODE} TORCHELASTIC_RUN_ID=7"),
    *(f"{ONE_NODE} LOCAL_RANK=9", ONE_NODE, SHELL),
]


def verdicts(text, gpus=8, there=8, **system):
    """{item: verdict} of a process with these variables, which sees n of the GPUs that are there."""
    cards = tuple(Gpu(name="GPU", capability=(9, 0), peers=tuple(range(gpus))) for _ in range(gpus))
    system = {"cores": 64, "machine_cores": 64} | system
    return check(replace(CPU_ONLY, makers=("nvidia",) * there, gpus=cards, environment=env(text), **system))


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


SHELLS = "the Slurm job has 8 tasks, but this process was started by its script without srun"
FEW = {"cores": 4, "threads": 16}  # a container with a share of the cores
#: An item, variables, GPUs that are seen and there, what the system is otherwise, the verdict and its words.
VERDICTS = [
    ("launcher", SHELL, 8, 8, {}, "WARN", SHELLS),
    ("launcher", f"{SHELL} SLURM_NTASKS=1", 8, 8, {}, "OK", ""),
    ("ranks", "", 0, 0, {}, "OK", "1 on this node, on the CPU"),
    ("ranks", "", 8, 8, {}, "OK", "one of 8 GPUs"),
    ("ranks", ONE_NODE, 8, 8, {}, "OK", "8 on this node, one to each GPU"),
    ("ranks", ONE_NODE, 1, 1, {}, "MISS", "8 processes on this node would share 1 GPU"),
    ("ranks", f"{ONE_NODE} CUDA_VISIBLE_DEVICES=3", 1, 8, {}, "OK", "given a GPU to itself"),
    ("ranks", f"{ONE_NODE} LOCAL_WORLD_SIZE=4", 8, 8, {}, "WARN", "4 on this node, 8 GPUs"),
    ("cores", ONE_NODE, 8, 8, {"cores": 64, "threads": 8}, "OK", "64 of 64"),
    ("cores", f"{STEP} {ONE_NODE}", 8, 8, {"cores": 1}, "WARN", "--cpus-per-task"),
    ("cores", ONE_NODE, 8, 8, {"cores": 64, "threads": 64}, "WARN", "OMP_NUM_THREADS=8"),
    ("cores", "", 8, 8, FEW, "WARN", "4 of 64; 1 process of OMP_NUM_THREADS=16"),
    ("cores", "", 8, 8, FEW, "WARN", "OMP_NUM_THREADS=4:"),
]


@pytest.mark.parametrize(("name", "text", "gpus", "there", "system", "status", "words"), VERDICTS)
def test_launchers_ranks_and_cores(name, text, gpus, there, system, status, words):
    item = verdicts(text, gpus, there, **system)[name]
    assert item.status == status
    assert words in f"{item.found}; {item.fix}"
