"""Worlds of several processes on this machine, each started as torchrun starts its workers.

This process keeps the store in which they meet, so that their port is free for certain. They end with it: on
Linux the kernel kills them when it ends, whatever it ends of. They are not of its group of processes: Ctrl-C
reaches this process alone, which kills them, since what is measured has nothing to save.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from narrowgauge.distributed.launch.launcher_env import launch_info
from narrowgauge.errors import UserError

# What launchers tell a process; a process that we start hears us alone.
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
_GRACE_S = 3.0  # for those that end because of another one's error


class WorldFailed(Exception):
    """A process of a world did not end well: `code` is its exit code, negative where a signal killed it."""

    def __init__(self, size: int, code: int) -> None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        super().__init__(f"a process of {size} {how}")
        self.code = code


def refuse_several(environ: Mapping[str, str]) -> None:
    """Refuse to be one of several processes that a launcher has started; a batch script of Slurm's is alone.

    Raises:
        UserError: it is.
    """
    place = launch_info(environ)
    if place.size > 1 and (place.launcher != "srun" or environ.get("SLURM_STEP_ID")):
        raise UserError(
            f"{place.launcher} started {place.size} processes, but scaling starts its own; "
            f"start it once, without {place.launcher}"
        )


def run_world(size: int, arguments: Sequence[str], threads: int) -> None:
    """Run `narrowgauge ARGUMENTS` as each of `size` processes with so many threads, to their end.

    Raises:
        WorldFailed: one of them ended otherwise than with 0; it has said why, unless a signal killed it.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "narrowgauge", *arguments]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            environment = _environment(rank, size, store.port, threads)
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    process_group=0,
                )
            )
        if code := _end_of(processes):
            raise WorldFailed(size, code)
    finally:
        for process in processes:
            process.kill()  # does nothing to one that has ended
        for process in processes:
            process.wait()


def _environment(rank: int, size: int, port: int, threads: int) -> dict[str, str]:
    """As torchrun sets it: its words make a process die with its launcher, and rank 0 speak for all."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_LAUNCHERS) and name not in _OF_TORCHRUN
    }
    own = {
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
    return inherited | {name: str(value) for name, value in own.items()}


def _end_of(processes: Sequence["subprocess.Popen[bytes]"]) -> int:
    """0 when all have ended so; else the exit code of one. Who was killed has not told the others."""
    deadline = float("inf")
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed and deadline == float("inf"):
            deadline = time.monotonic() + _GRACE_S
        if None not in codes or min(failed, default=0) < 0 or time.monotonic() > deadline:
            return min(failed, default=0)
        time.sleep(0.02)
