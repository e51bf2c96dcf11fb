"""What launchers tell a process, and what it means: one list for the tests of `train` and of `doctor`."""

from narrowgauge.distributed.launch.slurm_env import port_of


def env(text: str) -> dict[str, str]:
    """The variables that a text of NAME=VALUE words sets."""
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
ALONE = (
    "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1"
)
MEET = "MASTER_ADDR=n1 MASTER_PORT=1234"

# (variables, (rank, size, local rank, local size, node, nodes, launcher, address, port) that they mean)
WORLDS = [
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
    # mpirun -np 1, whose daemon srun started on each of two nodes
    (
        f"{SRUN} SLURM_NTASKS=2 SLURM_TASKS_PER_NODE=1(x2) {ALONE}",
        (0, 1, 0, 1, 0, 1, "mpirun", "localhost", 0),
    ),
    # nodes of different sizes
    (
        f"{SRUN} SLURM_NTASKS=11 SLURM_TASKS_PER_NODE=8,3",
        (9, 11, 1, 3, 1, 2, "srun", "frontier00123", port_of(777)),
    ),
]

# (variables that train refuses, words of its sentence)
REFUSED = [
    (MPIRUN, ("mpirun started 4 processes", "separate world", "-x MASTER_ADDR=")),
    (HYDRA, ("mpiexec started 4 processes", "-genv MASTER_ADDR")),
    (f"{SRUN} RANK=0 WORLD_SIZE=1", ("srun started 16 processes", "WORLD_SIZE=1", "unset RANK")),
    ("SLURM_NTASKS=8 RANK=0 WORLD_SIZE=1", ("Slurm started 8", "WORLD_SIZE=1")),
    (f"{MPIRUN} RANK=0 WORLD_SIZE=1 {MEET}", ("mpirun started 4", "WORLD_SIZE=1")),
    (
        f"{SRUN} {TORCHRUN} GROUP_WORLD_SIZE=1 WORLD_SIZE=4 RANK=1 GROUP_RANK=0",
        ("srun started torchrun 16 times", "--nnodes 2"),
    ),
    (
        f"{SRUN} {ALONE}",
        ("srun started 16 processes", "mpirun starts each as a single one", "not by one inside"),
    ),
    ("ENVIRONMENT=BATCH SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0", ("without srun", "write srun")),
    ("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_LOCALID=0", ("srun", "MASTER_ADDR is not set")),
    ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1", ("MASTER_ADDR is not set",)),
    (f"RANK=1 {MEET}", ("RANK is set but WORLD_SIZE is not",)),
    (f"WORLD_SIZE=2 {MEET}", ("WORLD_SIZE is set but RANK is not",)),
    (f"RANK=1 WORLD_SIZE=2 {MEET}", ("LOCAL_RANK is not",)),
    (f"RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 {MEET}", ("2 of 2", "cannot be")),
    ("RANK=one WORLD_SIZE=2", ("RANK is 'one'", "whole number")),
    ("PMIX_RANK=1", ("PMIX_RANK", "gives the number of processes")),
    (f"{SRUN} MASTER_PORT=70000", ("MASTER_PORT is 70000",)),
    (f"{SRUN} SLURM_NODELIST=a[1-", ("'a[1-'", "node[01-04,07]")),
    (f"{SRUN} SLURM_TASKS_PER_NODE=8*2", ("8*2", "8(x3),4")),
]

# (variables, GPUs that the process sees, its own among them; None: train refuses to share one)
DEVICES = [
    (TORCHRUN, 4, 1),
    (SRUN, 8, 1),
    # where the launcher shows each its own, all see one
    (f"{SRUN} SLURM_GPUS_PER_TASK=1", 1, 0),
    (f"{TORCHRUN} CUDA_VISIBLE_DEVICES=1", 1, 0),
    (TORCHRUN, 2, None),
    (SRUN, 1, None),
    (f"{TORCHRUN} CUDA_VISIBLE_DEVICES=0", 1, None),
    (f"{MPIRUN} {MEET}", 1, None),
]

# Variables of torchrun or mpirun that cannot be, and words of the sentence.
CONTRADICTIONS = {
    "no size": ("RANK=0", "WORLD_SIZE is not"),
    "no rank": ("WORLD_SIZE=2", "RANK is not"),
    "beyond the size": ("RANK=5 WORLD_SIZE=2 LOCAL_RANK=5 MASTER_ADDR=a", "5 of 2"),
    "no number": ("RANK=first WORLD_SIZE=2", "not a whole number"),
    "nowhere to meet": ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2", "MASTER_ADDR"),
}
