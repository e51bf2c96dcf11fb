"""What launchers tell a process, and what it means: one list for the tests of `train` and of `doctor`."""


def env(text: str) -> dict[str, str]:
    """The variables that a text of NAME=VALUE words sets."""
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = (
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=n1 "
    "MASTER_PORT=1234 TORCHELASTIC_RUN_ID=none"
)
SRUN = (
    "SLURM_PROCID=9 SLURM_STEP_NUM_TASKS=16 SLURM_STEP_NUM_NODES=2 SLURM_LOCALID=1 SLURM_NODEID=1 "
    "SLURM_JOB_ID=777 SLURM_STEP_ID=0"
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

#: As the script of `launch` has srun start a process.
BY_SCRIPT = f"{SRUN} RANK=9 WORLD_SIZE=16 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8 {MEET}"

# (variables, (rank, size, local rank, local size, address, port) that they mean)
WORLDS = [
    ("", (0, 1, 0, 1, "localhost", 0)),
    (TORCHRUN, (5, 8, 1, 4, "n1", 1234)),
    (f"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 {MEET}", (1, 2, 1, 2, "n1", 1234)),
    ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=n1", (1, 2, 1, 2, "n1", 29500)),
    (BY_SCRIPT, (9, 16, 1, 8, "n1", 1234)),
    # nodes of which srun tells the number, and sizes that differ
    (f"{SRUN} RANK=9 WORLD_SIZE=16 LOCAL_RANK=1 {MEET}", (9, 16, 1, 8, "n1", 1234)),
    (f"RANK=9 WORLD_SIZE=11 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8 {MEET}", (9, 11, 1, 8, "n1", 1234)),
    (f"{MPIRUN} RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 {MEET}", (3, 4, 1, 2, "n1", 1234)),
    # srun starts one torchrun a node
    (f"{SRUN} SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 {TORCHRUN}", (5, 8, 1, 4, "n1", 1234)),
    # torchrun in the shell of a batch script with 16 tasks
    (f"ENVIRONMENT=BATCH SLURM_PROCID=0 SLURM_NTASKS=16 {TORCHRUN}", (5, 8, 1, 4, "n1", 1234)),
    # mpirun -np 1, whose daemon srun started on each of two nodes
    (f"{SRUN} SLURM_STEP_NUM_TASKS=2 {ALONE}", (0, 1, 0, 1, "localhost", 0)),
    # srun whose own PMI counts another way, and a step of one task
    (f"{SRUN} SLURM_STEP_NUM_TASKS=1 PMI_RANK=0 PMI_SIZE=1", (0, 1, 0, 1, "localhost", 0)),
]

# (variables that train refuses, words of its sentence)
REFUSED = [
    (MPIRUN, ("mpirun started 4 processes", "separate world", "RANK=$OMPI_COMM_WORLD_RANK")),
    (f"{MPIRUN} {MEET}", ("mpirun started 4 processes", "torchrun once a node")),
    (HYDRA, ("mpiexec started 4 processes", "RANK=$PMI_RANK")),
    (CRAY, ("mpiexec started 4 processes", "separate world")),
    (SRUN, ("srun started 16 processes", "separate world", "RANK=$SLURM_PROCID")),
    (f"{SRUN} PMI_RANK=0 PMI_SIZE=1", ("srun started 16 processes", "separate world")),
    (f"{SRUN} SLURM_PROCID=0 {MPIRUN}", ("mpirun started 4 processes", "separate world")),
    (f"{SRUN} RANK=0 WORLD_SIZE=1", ("srun started 16 processes", "WORLD_SIZE=1", "unset RANK")),
    ("SLURM_NTASKS=8 RANK=0 WORLD_SIZE=1", ("Slurm started 8", "WORLD_SIZE=1")),
    (f"{MPIRUN} RANK=0 WORLD_SIZE=1 {MEET}", ("mpirun started 4", "WORLD_SIZE=1")),
    (
        f"{SRUN} {TORCHRUN} GROUP_WORLD_SIZE=1 WORLD_SIZE=4 RANK=1 GROUP_RANK=0",
        ("srun started torchrun 16 times", "--nnodes"),
    ),
    (f"{SRUN} {ALONE}", ("srun started 16 processes", "separate world")),
    ("ENVIRONMENT=BATCH SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0", ("without srun", "write srun")),
    ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1", ("MASTER_ADDR is not set", "separate world")),
    (f"RANK=1 {MEET}", ("RANK is set but WORLD_SIZE is not",)),
    (f"WORLD_SIZE=2 {MEET}", ("WORLD_SIZE is set but RANK is not",)),
    (f"RANK=1 WORLD_SIZE=2 {MEET}", ("LOCAL_RANK is not",)),
    (f"RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 {MEET}", ("2 of 2", "cannot be")),
    ("RANK=one WORLD_SIZE=2", ("RANK is 'one'", "integer")),
    ("PMIX_RANK=1", ("PMIX_RANK", "start by torchrun")),
    (f"{BY_SCRIPT} MASTER_PORT=70000", ("MASTER_PORT is 70000",)),
]

# (variables, GPUs that the process sees, its own among them; None: train refuses to share one)
DEVICES = [
    (TORCHRUN, 4, 1),
    (BY_SCRIPT, 8, 1),
    # where the launcher shows each its own, all see one
    (f"{BY_SCRIPT} SLURM_GPUS_PER_TASK=1", 1, 0),
    (f"{TORCHRUN} CUDA_VISIBLE_DEVICES=1", 1, 0),
    (TORCHRUN, 2, None),
    (BY_SCRIPT, 1, None),
    (f"{TORCHRUN} CUDA_VISIBLE_DEVICES=0", 1, None),
]
