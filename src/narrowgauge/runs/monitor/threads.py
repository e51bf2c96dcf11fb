"""The number of threads of a run on a CPU: a given number, or the number of free cores when it begins.

All threads of an operation wait for the last one. While another program is running, one of them often has no
core, and each of the thousand operations of a step waits for it: with one of two cores taken, a step with two
threads took 3.7 times as long as on quiet cores, and one with one thread 2.0 times (`benchmarks/busy.py`,
experiments/LOG.md).

Sums are split into a part for each thread, so the number of threads affects the last digits of a loss. That
is why a configuration may pin it, and a resumed run keeps it:

    1. training.threads    a key of the configuration; threads in excess of the cores take turns
    2. OMP_NUM_THREADS     set by the user, or by torchrun for several processes
    3. a resumed run       the number recorded at its start, if this machine has enough cores
    4. otherwise           the cores that no other program uses, at least one
"""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from narrowgauge.operating_system import cores_of_others

_DIGITS = "so that its last digits may differ from a run that was never stopped"


@cache
def threads_of_torch() -> int:
    """torch's default, before a run in this process has set another number."""
    return torch.get_num_threads()


def threads_of(lines: Sequence[Mapping[str, Any]], pinned: int = 0) -> tuple[int, str]:
    """The number of threads of a run, and a line about it.

    Args:
        lines: The run's metrics; empty for a new run.
        pinned: The number that the configuration sets; 0 if it sets none.

    Returns:
        The number, and a line about it.
    """
    here = pinned or threads_of_torch()
    recorded = next((int(line["threads"]) for line in reversed(lines) if "threads" in line), here)
    resumes = any(line.get("event") == "start" for line in lines)
    if resumes and (pinned or recorded > here or os.environ.get("OMP_NUM_THREADS")) and recorded != here:
        return here, f"threads: {here}, and the run had {recorded}, {_DIGITS}"
    if pinned or resumes:
        return (
            pinned or recorded,
            f"threads: {pinned or recorded}, as {'before' if resumes else 'configured'}",
        )
    others = 0.0 if os.environ.get("OMP_NUM_THREADS") else cores_of_others()
    free = min(here, max(1, round(here - others)))
    busy = f" of {here}, since other programs use {others:.1f} cores" if free != here else ""
    return free, f"threads: {free}{busy}; the last digits depend on it, and --training.threads N pins it"
