"""The rank, node and device of this process, and the number of ranks, from the environment of any launcher.

A run starts the same way under torchrun, srun and mpirun, and needs no MPI library. The dangerous case is a
launcher that starts eight processes of which none knows about the others: eight runs on one GPU, in one
directory. This is an error, not a warning, and so is a GPU that several processes would share.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from narrowgauge.distributed.launch.launcher_env import (
    LaunchInfo,
    launch_info,
    number,
    refuse_separate_worlds,
)
from narrowgauge.distributed.launch.slurm_env import expand_hosts, port_of
from narrowgauge.errors import UserError

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_FIXES = {
    "mpirun": "add -x MASTER_ADDR=HOST -x MASTER_PORT=29500 to mpirun, HOST being that of rank 0",
    "mpiexec": "add -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 to mpiexec, HOST being that of rank 0",
}


@dataclass(frozen=True, slots=True)
class World(LaunchInfo):
    """The rank of this process, its node and its device, and the address at which rank 0 listens."""

    master_addr: str
    master_port: int
    device: int = 0  # index of this process's GPU, among those it sees


def world_from(environ: Mapping[str, str], gpus: int) -> World:
    """The world that the environment describes, for a process with `gpus` GPUs (0: it computes on the CPU).

    Raises:
        UserError: several processes were started but each would be alone, several would share a GPU, the
            address of rank 0 is not known, or the variables contradict each other.
    """
    info = launch_info(environ)
    refuse_separate_worlds(environ, info)
    local = 0 <= info.local_rank < info.local_size <= info.size
    if not (local and 0 <= info.rank < info.size and 0 <= info.node < info.nodes):
        raise UserError(
            f"{info.launcher}'s variables call this {info.rank} of {info.size}, {info.local_rank} "
            f"of {info.local_size} on node {info.node} of {info.nodes}, which cannot be; unset them"
        )
    address, port = _master_address(environ, info)
    device = _device(environ, info, gpus)
    return World(**asdict(info), master_addr=address, master_port=port, device=device)


def _master_address(environ: Mapping[str, str], info: LaunchInfo) -> tuple[str, int]:
    """The address and port at which rank 0 listens; port 0 (any) for a process alone."""
    hosts = (
        environ.get("SLURM_STEP_NODELIST")
        or environ.get("SLURM_JOB_NODELIST")
        or environ.get("SLURM_NODELIST")
    )
    job = number(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    address, port = environ.get("MASTER_ADDR"), number(environ, "MASTER_PORT")
    if info.size == 1:
        return address or "localhost", port or 0
    if not address and hosts:
        address = next(expand_hosts(hosts))
    if not address and info.launcher == "srun" and info.nodes == 1:
        address = "localhost"
    if not address:
        fix = _FIXES.get(info.launcher, "set it to the host of rank 0")
        raise UserError(
            f"{info.launcher} started {info.size} processes, but MASTER_ADDR is not set, so each would "
            f"be a separate world; {fix}"
        )
    if port is None:
        port = 29500 if job is None else port_of(job, number(environ, "SLURM_STEP_ID") or 0)
    if not 0 < port < 65536:
        raise UserError(
            f"MASTER_PORT is {port}, but a port is a number from 1 to 65535; correct it or unset it"
        )
    return address, port


def _device(environ: Mapping[str, str], info: LaunchInfo, gpus: int) -> int:
    """The index of this process's GPU among those it sees."""
    if gpus == 0 or info.local_size <= gpus:
        return info.local_rank if gpus else 0
    # A launcher may show each process a different GPU; then each of them sees one.
    visible = [environ[name] for name in _VISIBLE if environ.get(name)]
    if gpus == 1 and (environ.get("SLURM_GPUS_PER_TASK") or visible[:1] == [str(info.local_rank)]):
        return 0
    raise UserError(
        f"{info.local_size} processes on this node would share {gpus} GPU(s), but each needs its own; start "
        f"at most {gpus} a node, or train with --device cpu"
    )
