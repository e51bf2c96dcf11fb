"""How many threads a run computes with on a CPU: as many as cores are free, and as many when it is resumed.

All threads of an operation wait for the last one. Beside another program one of them often has no core, and
each of the thousand operations of a step waits for it: two threads on two cores, one of which is taken, took
3.7 times as long for a step as on quiet cores, and one thread took 2.0 times (`benchmarks/busy.py`,
docs/lab-log.md).

Sums are cut into a part for each thread, so the number of threads changes the last digits of a loss. That is
why a resumed run keeps its own:

    1. OMP_NUM_THREADS     what the user says; torchrun sets it for several processes
    2. a resumed run       what its start recorded, if this machine has so many cores
    3. otherwise           the cores that no other program uses, at least one
"""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from narrowgauge.operating_system import cores_of_others

_DIGITS = "so that its last digits may differ from those of a run that was never stopped"


@cache
def threads_of_torch() -> int:
    """What torch takes by itself: before any run of this process has chosen another number."""
    return torch.get_num_threads()


def threads_of(lines: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """The number of threads of a run, and a line about it.

    Args:
        lines: The run's metrics; none for a new run.

    Returns:
        The number, and what a user has to know of the choice; "" where it is what torch would take.
    """
    here = threads_of_torch()
    recorded = next((int(line["threads"]) for line in reversed(lines) if "threads" in line), here)
    resumes = any(line.get("event") == "start" for line in lines)
    if resumes and (recorded > here or os.environ.get("OMP_NUM_THREADS")):
        changed = f"threads: {here}, and the run had {recorded}, {_DIGITS}"
        return here, changed if recorded != here else ""
    if resumes:
        return recorded, f"threads: {recorded}, as before" if recorded != here else ""
    others = 0.0 if os.environ.get("OMP_NUM_THREADS") else cores_of_others()
    free = min(here, max(1, round(here - others)))
    words = (
        f"threads: {free} of {here}, since other programs use {others:.1f} cores; OMP_NUM_THREADS=N sets it"
    )
    return free, words if free != here else ""
