"""Reads the environment variables in which each launcher describes a process.

    torchrun       RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE
    Open MPI       OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    MPICH, Intel   PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    Cray           PMI_RANK, PMI_SIZE, PMI_LOCAL_RANK, PMI_LOCAL_SIZE
    PMIx           PMIX_RANK, and no size
    srun           SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID

Launchers nest. Inside a Slurm job mpirun leaves Slurm's variables set, but only mpirun's variables describe
this process: the first launcher in the order above decides. The shell of a Slurm batch script has the
variables of task 0 of its job, but no `SLURM_STEP_ID`, which is set only in processes started by srun.

Sources: https://docs.pytorch.org/docs/stable/elastic/run.html ("Environment Variables"),
https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html, https://slurm.schedmd.com/srun.html.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from narrowgauge.distributed.launch.slurm_env import tasks_of_nodes
from narrowgauge.errors import UserError


class NotStartedBySrun(UserError):
    """The shell of a Slurm batch script: its job has several tasks, and srun has started none of them."""


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """A process as its launcher's variables describe it."""

    launcher: str  # torchrun, mpirun, mpiexec, srun; none for a process alone
    rank: int
    size: int
    local_rank: int  # among the processes of this node
    local_size: int
    node: int
    nodes: int


def number(environ: Mapping[str, str], *names: str) -> int | None:
    """The value of the first of these variables that is set."""
    for name in names:
        if environ.get(name):
            try:
                return int(environ[name])
            except ValueError:
                raise UserError(f"{name} is {environ[name]!r}, which is no whole number; unset it") from None
    return None


def launch_info(environ: Mapping[str, str]) -> LaunchInfo:
    """The description of this process by its launcher; without a launcher it is the only process."""
    alone = LaunchInfo("none", 0, 1, 0, 1, 0, 1)
    outer = _from_mpi(environ) or _from_slurm(environ)
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return _from_torchrun(environ, outer or alone)
    if outer is None and environ.get("PMIX_RANK"):
        raise UserError(
            "PMIX_RANK is set, but no variable gives the number of processes; start them by srun, "
            "torchrun or mpirun, or set RANK, WORLD_SIZE and LOCAL_RANK as well"
        )
    return outer or alone


def _from_torchrun(environ: Mapping[str, str], outer: LaunchInfo) -> LaunchInfo:
    rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    if rank is None or size is None:
        given, missing = ("RANK", "WORLD_SIZE") if size is None else ("WORLD_SIZE", "RANK")
        raise UserError(
            f"{given} is set but {missing} is not; set both, or neither and start by torchrun or srun"
        )
    same = outer if (outer.rank, outer.size) == (rank, size) else None
    local_rank = number(environ, "LOCAL_RANK")
    if local_rank is None and same is None and size > 1:
        raise UserError(
            "RANK and WORLD_SIZE are set but LOCAL_RANK is not, so that processes of a node could not choose "
            "different GPUs; set it, or start by torchrun"
        )
    nodes = number(environ, "GROUP_WORLD_SIZE", "NNODES") or (same.nodes if same else 1)
    local_size = number(environ, "LOCAL_WORLD_SIZE") or (same.local_size if same else max(1, size // nodes))
    node = number(environ, "GROUP_RANK", "NODE_RANK")
    if node is None:
        node = same.node if same else rank // local_size
    if local_rank is None:
        local_rank = same.local_rank if same else 0
    nodes = max(nodes, -(-size // local_size))
    return LaunchInfo("torchrun", rank, size, local_rank, local_size, node, nodes)


def _from_mpi(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Open MPI; then Hydra (MPICH, Intel MPI) and Cray's PALS, unless srun started the process."""
    launcher, prefix = "mpirun", "OMPI_COMM_WORLD"
    if not environ.get("OMPI_COMM_WORLD_RANK"):
        if environ.get("SLURM_PROCID") and not environ.get("MPI_LOCALRANKID"):
            return None
        launcher, prefix = "mpiexec", "PMI"
    rank, size = number(environ, f"{prefix}_RANK"), number(environ, f"{prefix}_SIZE")
    if rank is None or size is None:
        return None
    local_rank = number(environ, f"{prefix}_LOCAL_RANK", "MPI_LOCALRANKID")
    local_size = max(1, number(environ, f"{prefix}_LOCAL_SIZE", "MPI_LOCALNRANKS") or size)
    # MPI does not report the node: assume that ranks fill one node after the other, the default.
    local_rank = rank % local_size if local_rank is None else local_rank
    node, nodes = rank // local_size, -(-size // local_size)
    return LaunchInfo(launcher, rank, size, local_rank, local_size, node, nodes)


def _from_slurm(environ: Mapping[str, str]) -> LaunchInfo | None:
    rank = number(environ, "SLURM_PROCID")
    if rank is None:
        return None
    size = number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") or 1
    node = number(environ, "SLURM_NODEID") or 0
    nodes = number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    tasks = tasks_of_nodes(counts) if counts else []
    local_size = max(1, tasks[node] if node < len(tasks) and sum(tasks) == size else -(-size // nodes))
    local_rank = number(environ, "SLURM_LOCALID")
    local_rank = rank % local_size if local_rank is None else local_rank
    return LaunchInfo("srun", rank, size, local_rank, local_size, node, nodes)


def refuse_separate_worlds(environ: Mapping[str, str], info: LaunchInfo) -> None:
    """Refuse several processes that would each train alone; `info` is the `launch_info` of `environ`.

    Raises:
        NotStartedBySrun: this is the shell of a batch script, whose job has several tasks.
        UserError: the launcher started more processes than the world has.
    """
    outer = _from_mpi(environ) or _from_slurm(environ)
    in_step = bool(environ.get("SLURM_STEP_ID"))
    batch_shell = environ.get("ENVIRONMENT") == "BATCH" and not in_step
    if info.launcher == "srun" and info.size > 1 and batch_shell:
        raise NotStartedBySrun(
            f"the Slurm job has {info.size} tasks, but this process was started by its script without srun "
            "and would wait for the others; write srun before the command"
        )
    by_mpi = info.launcher in ("mpirun", "mpiexec")
    step = _from_slurm(environ) if by_mpi and in_step else None
    if step and info.size == 1 and step.size > step.nodes:  # mpirun has srun start one daemon a node
        raise UserError(
            f"srun started {step.size} processes, but {info.launcher} starts each as a single one; start "
            f"them by srun or by {info.launcher}, not by one inside the other"
        )
    if info.launcher != "torchrun":
        return
    if environ.get("TORCHELASTIC_RUN_ID"):
        if outer and outer.size > info.nodes and (in_step or outer.launcher != "srun"):
            raise UserError(
                f"{outer.launcher} started torchrun {outer.size} times, but each is a world of "
                f"{info.nodes} node(s); start it once a node, with --nnodes {outer.nodes}, --node-rank and "
                "--master-addr, or let srun start the processes without torchrun"
            )
        return
    tasks = outer.size if outer else number(environ, "SLURM_NTASKS") or 1
    if tasks not in (1, info.size):
        name = outer.launcher if outer else "Slurm"
        raise UserError(
            f"{name} started {tasks} processes, but WORLD_SIZE={info.size} is set, which does not match; "
            "unset RANK, WORLD_SIZE and LOCAL_RANK"
        )


def reports_for_all(environ: Mapping[str, str]) -> bool:
    """Whether this process prints an error that all processes have before they have joined a group.

    A process without a rank in its environment prints it: twice is better than never.
    """
    ranks = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"]
    if environ.get("TORCHELASTIC_RUN_ID"):
        ranks.append("RANK")
    if environ.get("SLURM_STEP_ID"):
        ranks.append("SLURM_PROCID")
    return all((environ.get(name) or "0").strip() in ("0", "") for name in ranks)
