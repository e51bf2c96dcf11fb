"""Processes that know of each other, and those that do not: every launcher's variables, and what is said."""

import pytest

from narrowgauge.cluster.doctor.doctor import check
from narrowgauge.cluster.doctor.facts import Facts, Gpu, Hardware, System

TORCHRUN = {
    **{"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"},
    **{"MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
MPICH = {"PMI_SIZE": "8", "PMI_RANK": "3", "MPI_LOCALNRANKS": "8"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "1", "SLURM_PROCID": "0"}
SRUN = BATCH | {
    **{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1"},
    **{"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_PROCID": "3", "SLURM_LOCALID": "3"},
    **{"PMI_SIZE": "8", "PMI_RANK": "3"},
}
TWO_NODES = {
    **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
    **{"PMI_SIZE": "2", "PMI_RANK": "1"},
}


def verdict(name, environment, gpus=8, there=8, **system):
    cards = tuple(Gpu(name="GPU", capability=(9, 0), peers=tuple(range(gpus))) for _ in range(gpus))
    facts = Facts(
        hardware=Hardware(makers=("nvidia",) * there, gpus=cards),
        system=System(cores=64, machine_cores=64) if not system else System(**system),
        environment=environment,
    )
    (item,) = [item for item in check(facts) if item.item == name]
    return item


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "started by itself"),
        (TORCHRUN, "process 3 of 8"),
        (MPIRUN | TORCHRUN, "process 3 of 8, started by mpirun"),
        (SRUN | TORCHRUN, "process 3 of 8, started by srun"),
        (
            SRUN | TWO_NODES | TORCHRUN | {"WORLD_SIZE": "16", "RANK": "11"},
            "process 11 of 16, by 2 torchruns",
        ),
        (BATCH, "a batch script or shell in Slurm's job 7, which has 8 tasks"),
        (
            SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "PMI_SIZE": "1"},
            "one process",
        ),
        (BATCH | MPIRUN | TORCHRUN, "started by mpirun"),
        (SRUN | TORCHRUN | {"RANK": "5", "TORCHELASTIC_RUN_ID": "none"}, "process 5 of 8"),
    ],
)
def test_one_world(environment, words):
    item = verdict("launcher", environment)
    assert item.status == "OK", item
    assert words in item.found


@pytest.mark.parametrize(
    ("environment", "words", "mend"),
    [
        (MPIRUN, "mpirun started 8 processes, but WORLD_SIZE is not set", "RANK=$OMPI_COMM_WORLD_RANK"),
        (MPICH, "mpirun started 8 processes, but WORLD_SIZE is not set", "RANK=$PMI_RANK"),
        (SRUN, "srun started 8 processes, but WORLD_SIZE is not set", "RANK=$SLURM_PROCID WORLD_SIZE=8"),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "1"}, "srun started 8 processes, but WORLD_SIZE=1", "torchrun"),
        (BATCH | {"SLURM_PROCID": "5"}, "srun started 8 processes", "torchrun"),
        (SRUN | TWO_NODES | MPICH, "mpirun started 8", "torchrun"),
        (SRUN | {"PMI_SIZE": "1"}, "MPI tells each that it is alone", "--mpi=pmix"),
        (SRUN | MPIRUN | {"OMPI_COMM_WORLD_SIZE": "1"}, "MPI tells each that it is alone", "--mpi=pmix"),
        (MPIRUN | TORCHRUN | {"RANK": "0"}, "RANK=0, but OMPI_COMM_WORLD_RANK=3", "its own"),
        (SRUN | TORCHRUN | {"WORLD_SIZE": "5"}, "8 processes, but WORLD_SIZE=5", "number of all processes"),
        ({"RANK": "0"}, "RANK=0, WORLD_SIZE=(not set)", "unset both"),
        ({"RANK": "x", "WORLD_SIZE": "8"}, "RANK=x", "torchrun"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "without MASTER_ADDR, MASTER_PORT", "rank 0"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "RANK=8, WORLD_SIZE=8", "torchrun"),
    ],
)
def test_a_world_of_one_and_worse(environment, words, mend):
    item = verdict("launcher", environment)
    assert item.status == "MISS"
    assert words in item.found
    assert mend in item.mend


@pytest.mark.parametrize(
    ("environment", "gpus", "there", "status", "words"),
    [
        ({}, 0, 0, "OK", "1 on this node, on the CPU"),
        ({}, 1, 1, "OK", "one to each GPU"),
        ({}, 8, 8, "OK", "one of 8 GPUs"),
        (TORCHRUN, 8, 8, "OK", "8 on this node, one to each GPU"),
        (TORCHRUN, 1, 1, "MISS", "8 on this node share 1 GPU"),
        (MPIRUN, 1, 1, "MISS", "8 on this node share 1 GPU"),
        (TORCHRUN, 1, 8, "OK", "one GPU of its own"),
        (SRUN | {"SLURM_GPUS_PER_TASK": "1"}, 1, 1, "OK", "one GPU of its own"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, 8, 8, "WARN", "4 on this node, 8 GPUs"),
        (TORCHRUN | {"LOCAL_RANK": "9"}, 8, 8, "MISS", "LOCAL_RANK=9"),
    ],
)
def test_processes_and_gpus(environment, gpus, there, status, words):
    item = verdict("ranks", environment, gpus, there)
    assert item.status == status
    assert words in item.found


def test_cores():
    assert verdict("cores", TORCHRUN, cores=64, machine_cores=64, threads=8).status == "OK"
    bound = verdict("cores", SRUN, cores=1, machine_cores=64)
    assert (bound.status, "--cpus-per-task" in bound.mend) == ("WARN", True)
    many = verdict("cores", TORCHRUN, cores=64, machine_cores=64, threads=64)
    assert (many.status, "OMP_NUM_THREADS=8" in many.mend) == ("WARN", True)
