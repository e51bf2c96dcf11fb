"""Runs the processes of an experiment on a cluster of Ray, each as a task: `compare --ray`.

In place of a run's program an engine starts this file as a program. It submits the run as a task, passes on
requests to stop, and exits with the run's code. A task takes the cores of a run, or a GPU where the cluster
has any. If its worker dies, or the machine does, Ray starts the task again elsewhere, and the run continues
from its last checkpoint. The machines share a file system, where the runs have the same path on each.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from signal import SIG_BLOCK, SIG_UNBLOCK, pthread_sigmask
from socket import create_connection
from subprocess import DEVNULL, Popen
from typing import Any

from narrowgauge.system.errors import EXIT_PREEMPTED, UserError
from narrowgauge.system.operating_system import STOP_SIGNALS, stop_signals
from narrowgauge.system.signals import die_with_launcher

_POLL_S, _ANSWER_S = 0.25, 10.0


def slots_of(address: str, cores: int) -> int:
    """The number of runs that a cluster has room for: one for each GPU, or for every `cores` cores."""
    ray = _connected(address)
    free = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    ray.shutdown()
    gpus = sum(int(has.get("GPU", 0)) for has in free)
    if not (slots := gpus or sum(int(has.get("CPU", 0) // cores) for has in free)):
        raise UserError(
            f"--ray {address}: no machine has the {cores} cores of a run; lower --training.threads"
        )
    return slots


def command_on(address: str, cores: int, log: Path, command: Sequence[str]) -> list[str]:
    """The command that runs another one as a task; its output goes to `log`."""
    return [sys.executable, "-m", __name__, address, str(cores), str(log), *command]


def _connected(address: str) -> Any:
    """The package `ray`, connected to the cluster at an address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    host, _, port = address.rpartition("/")[2].rpartition(":")
    try:
        ray = import_module("ray")
        if host:  # Ray itself would ask for minutes
            create_connection((host, int(port)), timeout=_ANSWER_S).close()
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except ImportError:
        raise UserError("--ray needs the package ray; python -m pip install 'narrowgauge[ray]'") from None
    except (OSError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"--ray {address}: no cluster of Ray answers ({why}); start one with 'ray start --head'"
        ) from None
    return ray


def _run(command: Sequence[str], environment: Mapping[str, str], folder: str, log: str) -> int:
    """The task: run a program with this machine's Python; where the task is cancelled, let it save."""
    with Path(folder, log).open("ab") as file:
        words, variables = [sys.executable, *command[1:]], {**os.environ, **environment}
        program = Popen(words, cwd=folder, env=variables, stdin=DEVNULL, stdout=file, stderr=file)
    try:
        while (code := program.poll()) is None:
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        program.terminate()
        return program.wait()
    return code


def main(address: str, cores: str, log: str, *command: str) -> int:
    """Run a command as a task; returns its exit code."""
    die_with_launcher(os.environ)
    pthread_sigmask(SIG_BLOCK, STOP_SIGNALS)  # they wait for a task to cancel
    ray = _connected(address)
    needs = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": int(cores)}
    own = {k: v for k, v in os.environ.items() if k.startswith("NARROWGAUGE_") or k.endswith("_NUM_THREADS")}
    task = ray.remote(_run).options(**needs).remote(command, own, str(Path.cwd()), log)
    with stop_signals(lambda *_: ray.cancel(task), at_the_end=True):
        pthread_sigmask(SIG_UNBLOCK, STOP_SIGNALS)
        while not ray.wait([task], timeout=_POLL_S)[0]:
            pass
    try:
        return ray.get(task)
    except ray.exceptions.TaskCancelledError:
        return EXIT_PREEMPTED
    except ray.exceptions.RayError as error:  # no start, or workers that died again and again
        why = getattr(error, "cause", type(error).__name__)
        print(f"narrowgauge: a task of Ray failed ({why}); each machine needs the same version and paths")
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
