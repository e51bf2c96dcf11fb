"""Launches several worker processes on this machine, with the environment of torchrun.

This process hosts the rendezvous store, so their port is known to be free. The workers end with this process:
on Linux the kernel kills them when it ends. They run in separate process groups, so Ctrl-C reaches only this
process, which kills them, since a measurement has nothing to save.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from subprocess import DEVNULL

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from narrowgauge.distributed.launch.launcher_env import launch_info
from narrowgauge.errors import ProcessFailed, UserError
from narrowgauge.processes import Programs

# Launcher variables that the workers must not inherit.
_OF_LAUNCHERS = (
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_LOCAL",
    "SLURM_",
    "TORCHELASTIC_",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
)
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "NODE_RANK", "NNODES")
_GRACE_S = 3.0  # for workers that end because another worker failed


class WorldFailed(ProcessFailed):
    """A worker failed; `code` is its exit code, negative if a signal killed it."""

    def __init__(self, size: int, code: int) -> None:
        super().__init__(f"a process of {size}", code)


def refuse_several(environ: Mapping[str, str]) -> None:
    """Check that no launcher started several processes; the shell of a Slurm batch script counts as one."""
    place = launch_info(environ)
    if place.size > 1 and (place.launcher != "srun" or environ.get("SLURM_STEP_ID")):
        raise UserError(
            f"{place.launcher} started {place.size} processes, but scaling starts its own; "
            f"start it once, without {place.launcher}"
        )


def run_world(size: int, arguments: Sequence[str], threads: int) -> None:
    """Run `narrowgauge ARGUMENTS` in `size` processes with `threads` threads each, and wait for them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "narrowgauge", *arguments]
    with Programs() as programs:
        for rank in range(size):
            environment = _environment(rank, size, store.port, threads)
            programs.start(command, environment, stdin=DEVNULL, stdout=DEVNULL, process_group=0)
        if code := programs.wait(_GRACE_S):
            raise WorldFailed(size, code)


def _environment(rank: int, size: int, port: int, threads: int) -> dict[str, str]:
    """The environment of torchrun: with it a worker dies with its launcher, and rank 0 reports for all."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_LAUNCHERS) and name not in _OF_TORCHRUN
    }
    variables = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "scaling",
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": threads,
    }
    return inherited | {name: str(value) for name, value in variables.items()}
