"""Which process of how many is this? Read from the environment alone, whoever started it.

A run starts alike under torchrun, srun and mpirun, and needs no MPI library. The dangerous case is a launcher
that starts eight processes without telling them of each other: eight runs on one GPU, in one directory. It
is refused, not warned about, and so is a GPU that several processes would share.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from narrowgauge.distributed.launch.launcher_env import (
    LaunchInfo,
    launch_info,
    number,
    refuse_separate_worlds,
)
from narrowgauge.distributed.launch.slurm_env import expand_hosts, port_of
from narrowgauge.errors import UserError

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_MENDS = {
    "mpirun": "add -x MASTER_ADDR=HOST -x MASTER_PORT=29500 to mpirun, HOST being that of rank 0",
    "mpiexec": "add -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 to mpiexec, HOST being that of rank 0",
}


@dataclass(frozen=True, slots=True)
class World:
    """The rank of this process, its node and its device, and the address at which rank 0 listens."""

    rank: int
    size: int
    local_rank: int  # among the processes of this node
    local_size: int
    node: int
    nodes: int
    launcher: str  # torchrun, mpirun, mpiexec, srun; none for a process alone
    master_addr: str
    master_port: int
    device: int = 0  # the GPU of this process, among those it sees


def world_from(environ: Mapping[str, str], gpus: int) -> World:
    """The world that the environment describes.

    Args:
        environ: the variables of the process.
        gpus: how many GPUs it sees; 0 where it computes on the CPU.

    Raises:
        UserError: several processes were meant but each would be alone, several would share a GPU, they have
            nowhere to meet, or the variables contradict each other.
    """
    place = launch_info(environ)
    refuse_separate_worlds(environ, place)
    here = 0 <= place.local_rank < place.local_size <= place.size
    if not (here and 0 <= place.rank < place.size and 0 <= place.node < place.nodes):
        raise UserError(
            f"{place.launcher}'s variables call this {place.rank} of {place.size}, {place.local_rank} "
            f"of {place.local_size} on node {place.node} of {place.nodes}, which cannot be; unset them"
        )
    address, port = _meeting_point(environ, place)
    return World(
        place.rank,
        place.size,
        place.local_rank,
        place.local_size,
        place.node,
        place.nodes,
        place.launcher,
        address,
        port,
        _device(environ, place, gpus),
    )


def _meeting_point(environ: Mapping[str, str], place: LaunchInfo) -> tuple[str, int]:
    """The address and port at which rank 0 listens; port 0 (any) for a process alone."""
    hosts = (
        environ.get("SLURM_STEP_NODELIST")
        or environ.get("SLURM_JOB_NODELIST")
        or environ.get("SLURM_NODELIST")
    )
    job = number(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    address, port = environ.get("MASTER_ADDR"), number(environ, "MASTER_PORT")
    if place.size == 1:
        return address or "localhost", port or 0
    if not address and hosts:
        address = next(expand_hosts(hosts))
    if not address and place.launcher == "srun" and place.nodes == 1:
        address = "localhost"
    if not address:
        mend = _MENDS.get(place.launcher, "set it to the host of rank 0")
        raise UserError(
            f"{place.launcher} started {place.size} processes, but MASTER_ADDR is not set, so each would "
            f"be a world of its own; {mend}"
        )
    if port is None:
        port = 29500 if job is None else port_of(job, number(environ, "SLURM_STEP_ID") or 0)
    if not 0 < port < 65536:
        raise UserError(
            f"MASTER_PORT is {port}, but a port is a number from 1 to 65535; correct it or unset it"
        )
    return address, port


def _device(environ: Mapping[str, str], place: LaunchInfo, gpus: int) -> int:
    """The index of this process's GPU among those it sees."""
    if gpus == 0 or place.local_size <= gpus:
        return place.local_rank if gpus else 0
    # A launcher may show each process a GPU of its own; then all processes see one, and it is another one.
    given = [environ[name] for name in _VISIBLE if environ.get(name)]
    if gpus == 1 and (environ.get("SLURM_GPUS_PER_TASK") or given[:1] == [str(place.local_rank)]):
        return 0
    raise UserError(
        f"{place.local_size} processes on this node would share {gpus} GPU(s), but each needs its own; start "
        f"at most {gpus} a node, or train with --device cpu"
    )
