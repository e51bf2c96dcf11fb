"""The place of a process from each launcher's variables; to train alone or to share a GPU is refused."""

import pytest

from faults.table import case
from narrowgauge.distributed import world_from
from narrowgauge.distributed.launch.slurm_env import expand_hosts, port_of, tasks_of_nodes
from narrowgauge.errors import UserError


def env(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = (
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=n1 "
    "MASTER_PORT=1234 TORCHELASTIC_RUN_ID=none"
)
SRUN = (
    "SLURM_PROCID=9 SLURM_NTASKS=16 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NNODES=2 SLURM_TASKS_PER_NODE=8(x2) "
    "SLURM_NODELIST=frontier[00123-00125,00200] SLURM_JOB_ID=777 SLURM_STEP_ID=0"
)
MPIRUN = (
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
)
HYDRA = "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"
CRAY = "PMI_RANK=3 PMI_SIZE=4 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2"
MEET = "MASTER_ADDR=n1 MASTER_PORT=1234"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (0, 1, 0, 1, 0, 1, "none", "localhost", 0)),
        (TORCHRUN, (5, 8, 1, 4, 1, 2, "torchrun", "n1", 1234)),
        (f"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 {MEET}", (1, 2, 1, 2, 0, 1, "torchrun", "n1", 1234)),
        (SRUN, (9, 16, 1, 8, 1, 2, "srun", "frontier00123", port_of(777))),
        (f"{SRUN} MASTER_ADDR=n1", (9, 16, 1, 8, 1, 2, "srun", "n1", port_of(777))),
        ("SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=3", (3, 8, 3, 8, 0, 1, "srun", "localhost", 29500)),
        (f"{MPIRUN} {MEET}", (3, 4, 1, 2, 1, 2, "mpirun", "n1", 1234)),
        (f"{MPIRUN} MASTER_ADDR=n1", (3, 4, 1, 2, 1, 2, "mpirun", "n1", 29500)),
        (f"{HYDRA} {MEET}", (3, 4, 1, 2, 1, 2, "mpiexec", "n1", 1234)),
        (f"{CRAY} {MEET}", (3, 4, 1, 2, 1, 2, "mpiexec", "n1", 1234)),
        # mpirun in a Slurm job: the shell of the batch script is "task 0", mpirun's own word counts
        (f"{SRUN} SLURM_PROCID=0 {MPIRUN} {MEET}", (3, 4, 1, 2, 1, 2, "mpirun", "n1", 1234)),
        # srun that speaks PMI itself
        (f"{SRUN} PMI_RANK=9 PMI_SIZE=16", (9, 16, 1, 8, 1, 2, "srun", "frontier00123", port_of(777))),
        # srun's variables handed on by a script
        (
            f"{SRUN} RANK=9 WORLD_SIZE=16 {MEET}",
            (9, 16, 1, 8, 1, 2, "torchrun", "n1", 1234),
        ),
        # srun starts one torchrun a node
        (f"{SRUN} SLURM_PROCID=1 SLURM_NTASKS=2 {TORCHRUN}", (5, 8, 1, 4, 1, 2, "torchrun", "n1", 1234)),
        # torchrun in the shell of a batch script with 16 tasks
        (
            f"ENVIRONMENT=BATCH SLURM_PROCID=0 SLURM_NTASKS=16 SLURM_NNODES=2 {TORCHRUN}",
            (5, 8, 1, 4, 1, 2, "torchrun", "n1", 1234),
        ),
        # nodes of different sizes
        (
            f"{SRUN} SLURM_NTASKS=11 SLURM_TASKS_PER_NODE=8,3",
            (9, 11, 1, 3, 1, 2, "srun", "frontier00123", port_of(777)),
        ),
    ],
)
def test_the_place_of_a_process(text, expected):
    w = world_from(env(text), gpus=0)
    place = (w.rank, w.size, w.local_rank, w.local_size, w.node, w.nodes)
    assert (*place, w.launcher, w.master_addr, w.master_port) == expected
    assert w.device == 0


@case("G5", quick=True)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MPIRUN, ("mpirun started 4 processes", "world of its own", "-x MASTER_ADDR=")),
        (HYDRA, ("mpiexec started 4 processes", "-genv MASTER_ADDR")),
        (f"{SRUN} RANK=0 WORLD_SIZE=1", ("srun started 16 processes", "WORLD_SIZE=1", "unset RANK")),
        ("SLURM_NTASKS=8 RANK=0 WORLD_SIZE=1", ("Slurm started 8", "WORLD_SIZE=1")),
        (f"{MPIRUN} RANK=0 WORLD_SIZE=1 {MEET}", ("mpirun started 4", "WORLD_SIZE=1")),
        (
            f"{SRUN} {TORCHRUN} GROUP_WORLD_SIZE=1 WORLD_SIZE=4 RANK=1 GROUP_RANK=0",
            ("srun started torchrun 16 times", "--nnodes 2"),
        ),
        ("ENVIRONMENT=BATCH SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0", ("without srun", "write srun")),
        ("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_LOCALID=0", ("srun", "MASTER_ADDR is not set")),
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1", ("MASTER_ADDR is not set",)),
        (f"RANK=1 {MEET}", ("RANK is set but WORLD_SIZE is not",)),
        (f"WORLD_SIZE=2 {MEET}", ("WORLD_SIZE is set but RANK is not",)),
        (f"RANK=1 WORLD_SIZE=2 {MEET}", ("LOCAL_RANK is not",)),
        (f"RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 {MEET}", ("2 of 2", "cannot be")),
        ("RANK=one WORLD_SIZE=2", ("RANK is 'one'", "whole number")),
        ("PMIX_RANK=1", ("PMIX_RANK", "how many")),
        (f"{SRUN} MASTER_PORT=70000", ("MASTER_PORT is 70000",)),
        (f"{SRUN} SLURM_NODELIST=a[1-", ("'a[1-'", "node[01-04,07]")),
        (f"{SRUN} SLURM_TASKS_PER_NODE=8*2", ("8*2", "8(x3),4")),
    ],
)
def test_what_is_refused_with_the_mend(text, words):
    with pytest.raises(UserError) as error:
        world_from(env(text), gpus=0)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_each_process_has_a_gpu_of_its_own():
    assert world_from(env(TORCHRUN), gpus=4).device == 1
    assert world_from(env(SRUN), gpus=8).device == 1
    # where the launcher shows each its own, all see one
    assert world_from(env(f"{SRUN} SLURM_GPUS_PER_TASK=1"), gpus=1).device == 0
    assert world_from(env(f"{TORCHRUN} CUDA_VISIBLE_DEVICES=1"), gpus=1).device == 0
    for text, gpus in (
        (TORCHRUN, 2),
        (SRUN, 1),
        (f"{TORCHRUN} CUDA_VISIBLE_DEVICES=0", 1),
        (f"{MPIRUN} {MEET}", 1),
    ):
        with pytest.raises(UserError, match=rf"would share {gpus} GPU\(s\).*at most {gpus} a node"):
            world_from(env(text), gpus)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("frontier[00123-00125,00200]", ["frontier00123", "frontier00124", "frontier00125", "frontier00200"]),
        ("a,b[1-2],c[9-11]-ib", ["a", "b1", "b2", "c9-ib", "c10-ib", "c11-ib"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("x-1.site.org,x-2.site.org", ["x-1.site.org", "x-2.site.org"]),
    ],
)
def test_lists_of_hosts(text, hosts):
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "a,", ",a", "a,,b", "a[", "a]", "a[]", "a[1-]", "a[1,]", "a b", "a[[1]]", "a[x]"]
)
def test_what_is_no_list_of_hosts(text):
    with pytest.raises(UserError, match="Slurm's form"):
        list(expand_hosts(text))


def test_only_the_first_host_of_a_huge_list_is_made():
    assert next(expand_hosts("n[0-99999999999999]")) == "n0"


def test_tasks_and_ports():
    assert tasks_of_nodes("8(x2),4") == [8, 8, 4]
    ports = {port_of(job) for job in range(1000)}
    assert len(ports) == 1000
    assert min(ports) > 1024
    assert max(port_of(job) for job in (14999, 15000, 10**9)) < 32768
    assert port_of(7, 1) != port_of(7)
