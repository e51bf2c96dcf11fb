"""Do the processes know of each other? Verdicts on the launcher, ranks and cores.

A run has a *world* of processes, and each must be told its rank in it: torch reads RANK and WORLD_SIZE, which
torchrun sets. srun and mpirun start processes too, but tell them in words of their own, so a program that is
started with `mpirun -np 8` alone sees no world and trains eight times the same model on one GPU: the *world
of one*. It is refused here.

| started by       | how many processes   | rank                 | on this node               |
|------------------|----------------------|----------------------|----------------------------|
| torchrun         | WORLD_SIZE           | RANK                 | LOCAL_WORLD_SIZE           |
| srun             | SLURM_STEP_NUM_TASKS | SLURM_PROCID         | SLURM_STEP_TASKS_PER_NODE  |
| Open MPI         | OMPI_COMM_WORLD_SIZE | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_LOCAL_SIZE |
| MPICH, Intel MPI | PMI_SIZE             | PMI_RANK             | MPI_LOCALNRANKS            |

A batch script has Slurm's variables as well, but no SLURM_STEP_ID, and its SLURM_PROCID is 0.
"""

from dataclasses import dataclass

from narrowgauge.cluster.doctor.facts import Facts, Item, miss, ok, warn

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_RUN_ID",
    *("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_STEP_ID"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE", "SLURM_GPUS_PER_TASK"),
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
_TORCHRUN = "start one torchrun on each node (torchrun --nnodes N --nproc-per-node GPUS -m narrowgauge ...)"


@dataclass(frozen=True, slots=True)
class _Launch:
    """How many processes a launcher started, and how many of them here; 0: not known."""

    name: str
    size: int
    local: int
    rank: str
    local_rank: str


def check_launch(facts: Facts) -> list[Item]:
    """The items of this file."""
    return [_launcher(facts), _ranks(facts), _cores(facts)]


def _launch(env: dict[str, str]) -> _Launch | None:
    """Who started this process, if it was a launcher of many."""
    if "OMPI_COMM_WORLD_SIZE" in env:
        local = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
        return _Launch("mpirun", _number(env, "OMPI_COMM_WORLD_SIZE"), local, *names)
    slurm = _slurm(env)
    # srun sets it as well; and an mpirun that starts its helpers by srun leaves Slurm's variables of those
    if "PMI_SIZE" in env and not (slurm and slurm.size == _number(env, "PMI_SIZE")):
        local = _number(env, "MPI_LOCALNRANKS")
        return _Launch("mpirun", _number(env, "PMI_SIZE"), local, "PMI_RANK", "MPI_LOCALRANKID")
    return slurm


def _slurm(env: dict[str, str]) -> _Launch | None:
    if "SLURM_STEP_ID" not in env and _number(env, "SLURM_PROCID") == 0:
        return None
    size = _number(env, "SLURM_STEP_NUM_TASKS") or _number(env, "SLURM_NTASKS")
    local = int("0" + _leading_digits(env.get("SLURM_STEP_TASKS_PER_NODE", "")))
    return _Launch("srun", size, local, "SLURM_PROCID", "SLURM_LOCALID")


def _launcher(facts: Facts) -> Item:
    env = facts.environment
    world, launch = _number(env, "WORLD_SIZE"), _launch(env)
    if wrong := _wrong_world(env, world):
        return wrong
    step = _slurm(env)
    if launch and launch.name == "mpirun" and launch.size == 1 and step and step.size > 1:
        return miss(
            "launcher",
            f"srun started {step.size} processes, and MPI tells each that it is alone",
            f"srun --mpi=pmix (or pmi2), or {_TORCHRUN}",
        )
    if launch and launch.size > 1:
        return _launched(env, launch, world)
    if world:
        by = f", started by {launch.name}" if launch else ""
        return ok("launcher", f"process {env['RANK']} of {world}{by}")
    if "SLURM_JOB_ID" in env:
        tasks = _number(env, "SLURM_NTASKS") or 1
        where = "a step of one process" if launch else "a batch script or shell"
        return ok("launcher", f"{where} in Slurm's job {env['SLURM_JOB_ID']}, which has {tasks} tasks")
    return ok("launcher", "one process, started by itself")


def _wrong_world(env: dict[str, str], world: int) -> Item | None:
    """What is wrong with the world that torch is told of, whoever started it; None: nothing."""
    told = [env[name].strip() for name in ("RANK", "WORLD_SIZE") if name in env]
    if told and (len(told) == 1 or not all(map(str.isdecimal, told)) or _number(env, "RANK") >= world):
        found = ", ".join(f"{name}={env.get(name, '(not set)')}" for name in ("RANK", "WORLD_SIZE"))
        return miss("launcher", found, f"unset both, or {_TORCHRUN}")
    without = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    if world > 1 and without:
        return miss(
            "launcher",
            f"WORLD_SIZE={world}, without {', '.join(without)}",
            f"{_TORCHRUN}, or set MASTER_ADDR to the node of rank 0, MASTER_PORT to a free port there, and "
            "LOCAL_RANK to the number of the process on its node",
        )
    return None


def _launched(env: dict[str, str], launch: _Launch, world: int) -> Item:
    """A launcher started several: is it the world that torch is told of?"""
    if world <= 1:
        told = f"WORLD_SIZE={world}" if world else "WORLD_SIZE is not set"
        return miss(
            "launcher",
            f"{launch.name} started {launch.size} processes, but {told}: each would train the same by itself",
            f"{_TORCHRUN}, or give each process RANK=${launch.rank} WORLD_SIZE={launch.size} "
            f"LOCAL_RANK=${launch.local_rank} and one MASTER_ADDR and MASTER_PORT",
        )
    if world == launch.size:
        number, theirs = env["RANK"], env.get(launch.rank)
        by_torchrun = "TORCHELASTIC_RUN_ID" in env  # which numbers processes as they come
        if theirs is not None and theirs != number and not by_torchrun:
            return miss(
                "launcher",
                f"RANK={number}, but {launch.rank}={theirs}",
                f"set RANK in each process to its own ${launch.rank}, not once for all",
            )
        return ok("launcher", f"process {number} of {world}, started by {launch.name}")
    if world == launch.size * _number(env, "LOCAL_WORLD_SIZE"):
        return ok(
            "launcher", f"process {env['RANK']} of {world}, by {launch.size} torchruns of {launch.name}"
        )
    return miss(
        "launcher",
        f"{launch.name} started {launch.size} processes, but WORLD_SIZE={world}",
        f"make them one: WORLD_SIZE is the number of all processes; or {_TORCHRUN}",
    )


def _local_ranks(env: dict[str, str]) -> int:
    """Processes of the run on this node; 1 where nobody says so."""
    launch = _launch(env)
    local = launch.local if launch else 0
    if launch and not local:
        nodes = _number(env, "SLURM_STEP_NUM_NODES") or _number(env, "SLURM_NNODES") or 1
        local = -(-launch.size // nodes)
    return max(1, _number(env, "LOCAL_WORLD_SIZE"), local)


def _ranks(facts: Facts) -> Item:
    env, hardware = facts.environment, facts.hardware
    local, gpus = _local_ranks(env), len(hardware.gpus)
    if not gpus:
        return ok("ranks", f"{local} on this node, on the CPU")
    if local > gpus:
        own = gpus == 1 and len(hardware.makers) >= local
        if own or (gpus == 1 and "SLURM_GPUS_PER_TASK" in env):
            return ok("ranks", f"{local} on this node; this one was given one GPU of its own")
        return miss(
            "ranks",
            f"{local} on this node share {gpus} GPU{'s' if gpus > 1 else ''}",
            f"start {gpus} on a node: several on one GPU are slower than one, and NCCL refuses them",
        )
    if _number(env, "LOCAL_RANK") >= gpus > 1:
        return miss(
            "ranks",
            f"LOCAL_RANK={env['LOCAL_RANK']}, and the GPUs are 0 to {gpus - 1}",
            "count LOCAL_RANK anew on each node",
        )
    if 1 < local < gpus:
        return warn("ranks", f"{local} on this node, {gpus} GPUs", f"start {gpus} to use every GPU")
    if local == 1 and gpus > 1:
        return ok("ranks", f"1 on this node, which uses one of {gpus} GPUs")
    return ok("ranks", f"{local} on this node, one to each GPU")


def _cores(facts: Facts) -> Item:
    system, local = facts.system, _local_ranks(facts.environment)
    found = f"{system.cores} of {system.machine_cores}"
    if system.cores == 1 < system.machine_cores:
        return warn(
            "cores",
            f"{found}: this process may use a single one, for Python, data and the GPU's queue",
            "ask the launcher for more (srun --cpus-per-task 8, mpirun --bind-to none)",
        )
    threads = system.threads
    if threads and threads * local > system.machine_cores:
        return warn(
            "cores",
            f"{found}; {local} processes of OMP_NUM_THREADS={threads}",
            f"OMP_NUM_THREADS={max(1, system.machine_cores // local)}: more threads than cores take turns",
        )
    return ok("cores", f"{found}" + (f", OMP_NUM_THREADS={threads}" if threads else ""))


def _number(env: dict[str, str], name: str) -> int:
    """A count in the environment; 0 where there is none."""
    value = env.get(name, "").strip()
    return int(value) if value.isdecimal() else 0


def _leading_digits(text: str) -> str:
    return text[: len(text) - len(text.lstrip("0123456789"))]
