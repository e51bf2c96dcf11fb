"""The rank, node and device of this process, from the variables that torchrun sets.

    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT      torch's "environment variable initialization"
    LOCAL_RANK, LOCAL_WORLD_SIZE                    the process among those of its node
    GROUP_RANK, GROUP_WORLD_SIZE                    the node among the nodes

The dangerous case is a launcher that starts eight processes without them: eight runs on one GPU, in one
directory. srun and mpirun do so, unless the line that they start sets these variables. So their own
variables are read only to count the processes: each a world of one is an error, not a warning, and so is a
GPU that several processes would share.

    Open MPI       OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE
    MPICH, Intel   PMI_RANK, PMI_SIZE, MPI_LOCALRANKID; Cray's too
    PMIx           PMIX_RANK, and no size
    srun           SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_ID

Launchers nest: inside a Slurm job mpirun leaves Slurm's variables set. The shell of a Slurm batch script has
the variables of task 0 of its job, but no `SLURM_STEP_ID`, which is set only in processes started by srun.

Sources: https://docs.pytorch.org/docs/stable/elastic/run.html ("Environment Variables"),
https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html, https://slurm.schedmd.com/srun.html.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from narrowgauge.system.errors import UserError

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_SET_THEM = {
    "srun": "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS",
    "mpirun": "RANK=$OMPI_COMM_WORLD_RANK LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK "
    "WORLD_SIZE=$OMPI_COMM_WORLD_SIZE",
    "mpiexec": "RANK=$PMI_RANK LOCAL_RANK=$MPI_LOCALRANKID WORLD_SIZE=$PMI_SIZE",
}


class NotStartedBySrun(UserError):
    """The shell of a Slurm batch script: its job has several tasks, and srun has started none of them."""


@dataclass(frozen=True, slots=True)
class World:
    """The rank of this process, its device, and the address at which rank 0 listens."""

    rank: int
    size: int
    local_rank: int  # among the processes of this node
    local_size: int
    master_addr: str
    master_port: int
    device: int = 0  # index of this process's GPU, among those it sees


def world_from(environ: Mapping[str, str], gpus: int) -> World:
    """The world that the environment describes, for a process with `gpus` GPUs (0: it computes on the CPU).

    Raises:
        NotStartedBySrun: this is the shell of a batch script, whose job has several tasks.
        UserError: several processes were started but each would be alone, several would share a GPU, the
            address of rank 0 is not known, or the variables contradict each other.
    """
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if (rank is None) != (size is None):
        given, missing = ("RANK", "WORLD_SIZE") if size is None else ("WORLD_SIZE", "RANK")
        raise UserError(f"{given} is set but {missing} is not; set both, or neither and start by torchrun")
    if rank is None or size is None:
        _refuse_worlds_of_one(environ)
        return World(0, 1, 0, 1, "localhost", 0)
    local_rank = _number(environ, "LOCAL_RANK")
    if local_rank is None and size > 1:
        raise UserError(
            "RANK and WORLD_SIZE are set but LOCAL_RANK is not, so that processes of a node could not choose "
            "different GPUs; set it, or start by torchrun"
        )
    local_rank = local_rank or 0
    nodes = _number(environ, "GROUP_WORLD_SIZE", "NNODES", "SLURM_STEP_NUM_NODES") or 1
    local_size = _number(environ, "LOCAL_WORLD_SIZE") or max(1, size // nodes)
    nodes = max(nodes, -(-size // local_size))
    node = _number(environ, "GROUP_RANK", "NODE_RANK")
    node = rank // local_size if node is None else node
    _refuse_other_sizes(environ, size, nodes)
    if not (0 <= local_rank < local_size <= size and 0 <= rank < size and 0 <= node < nodes):
        raise UserError(
            f"RANK and the other variables call this {rank} of {size}, {local_rank} of {local_size} on node "
            f"{node} of {nodes}, which cannot be; unset them"
        )
    address, port = environ.get("MASTER_ADDR", ""), _number(environ, "MASTER_PORT")
    if size > 1 and not address:
        raise UserError(
            f"WORLD_SIZE is {size}, but MASTER_ADDR is not set, so each process would be a separate world; "
            "set it to the host of rank 0"
        )
    port = 29500 if port is None else port
    if not 0 < port < 65536:
        raise UserError(
            f"MASTER_PORT is {port}, but a port is a number from 1 to 65535; correct it or unset it"
        )
    device = _device(environ, local_rank, local_size, gpus)
    return World(rank, size, local_rank, local_size, address or "localhost", port, device)


def processes_started(environ: Mapping[str, str]) -> tuple[str, int]:
    """The launcher around this process, other than torchrun, and how many processes it has started; ("", 1)
    without one."""
    if (size := _number(environ, "OMPI_COMM_WORLD_SIZE")) is not None:
        return "mpirun", size
    is_task = bool(environ.get("SLURM_PROCID"))
    if (size := _number(environ, "PMI_SIZE")) and (environ.get("MPI_LOCALRANKID") or not is_task):
        return "mpiexec", size
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    return ("srun", _number(environ, *names) or 1) if is_task else ("", 1)


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """The value of the first of these variables that is set."""
    for name in names:
        if environ.get(name):
            try:
                return int(environ[name])
            except ValueError:
                raise UserError(f"{name} is {environ[name]!r}, which is not an integer; unset it") from None
    return None


def _is_batch_shell(environ: Mapping[str, str]) -> bool:
    return environ.get("ENVIRONMENT") == "BATCH" and not environ.get("SLURM_STEP_ID")


def _refuse_worlds_of_one(environ: Mapping[str, str]) -> None:
    """Refuse to start if several processes run without a rank: each would train alone."""
    launcher, size = processes_started(environ)
    if not launcher and environ.get("PMIX_RANK"):
        raise UserError("PMIX_RANK is set, but RANK, WORLD_SIZE and LOCAL_RANK are not; start by torchrun")
    if launcher == "srun" and size > 1 and _is_batch_shell(environ):
        raise NotStartedBySrun(
            f"the Slurm job has {size} tasks, but this process was started by its script without srun "
            "and would train alone; write srun and torchrun before the command, or use narrowgauge launch"
        )
    tasks, hosts = (_number(environ, f"SLURM_STEP_NUM_{what}") or 1 for what in ("TASKS", "NODES"))
    if launcher != "srun" and size == 1 and tasks > hosts:  # mpirun has srun start one daemon a node
        launcher, size = "srun", tasks
    if size > 1:
        raise UserError(
            f"{launcher} started {size} processes, but RANK and WORLD_SIZE are not set, so each would be a "
            f"separate world; let {launcher} start torchrun once a node, or sh -c with MASTER_ADDR=HOST "
            f"{_SET_THEM[launcher]} before the command"
        )


def _refuse_other_sizes(environ: Mapping[str, str], size: int, nodes: int) -> None:
    """Refuse a world that has not the processes that were started."""
    launcher, started = processes_started(environ)
    if environ.get("TORCHELASTIC_RUN_ID"):
        if started > nodes and not _is_batch_shell(environ):
            raise UserError(
                f"{launcher} started torchrun {started} times, but each is a world of {nodes} node(s); start "
                "it once a node, with --nnodes, --node-rank and --master-addr"
            )
        return
    tasks = started if launcher else _number(environ, "SLURM_NTASKS") or 1
    if tasks not in (1, size):
        raise UserError(
            f"{launcher or 'Slurm'} started {tasks} processes, but WORLD_SIZE={size} is set, which does not "
            "match; unset RANK, WORLD_SIZE and LOCAL_RANK"
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


def _device(environ: Mapping[str, str], local_rank: int, local_size: int, gpus: int) -> int:
    """The index of this process's GPU among those it sees."""
    if gpus == 0 or local_size <= gpus:
        return local_rank if gpus else 0
    # A launcher may show each process a different GPU; then each of them sees one.
    visible = [environ[name] for name in _VISIBLE if environ.get(name)]
    if gpus == 1 and (environ.get("SLURM_GPUS_PER_TASK") or visible[:1] == [str(local_rank)]):
        return 0
    raise UserError(
        f"{local_size} processes on this node would share {gpus} GPU(s), but each needs its own; start "
        f"at most {gpus} a node, or train with --device cpu"
    )
