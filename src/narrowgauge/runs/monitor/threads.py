"""How many threads a run computes with on a CPU: a given number, or as many as cores are free when it begins.

All threads of an operation wait for the last one. Beside another program one of them often has no core, and
each of the thousand operations of a step waits for it: two threads on two cores, one of which is taken, took
3.7 times as long for a step as on quiet cores, and one thread took 2.0 times (`benchmarks/busy.py`,
docs/lab-log-archive.md).

Sums are cut into a part for each thread, so the number of threads changes the last digits of a loss. That is
why a run's configuration may pin it, and a resumed run keeps its own:

    1. training.threads    a key of the configuration; more than there are cores take turns
    2. OMP_NUM_THREADS     what the user says; torchrun sets it for several processes
    3. a resumed run       what its start recorded, if this machine has so many cores
    4. otherwise           the cores that no other program uses, at least one
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


def threads_of(lines: Sequence[Mapping[str, Any]], pinned: int = 0) -> tuple[int, str]:
    """The number of threads of a run, and a line about it.

    Args:
        lines: The run's metrics; none for a new run.
        pinned: The number that the configuration says; 0 if it says none.

    Returns:
        The number, and what a user has to know of the choice; "" where it is what torch would take.
    """
    here = pinned or threads_of_torch()
    recorded = next((int(line["threads"]) for line in reversed(lines) if "threads" in line), here)
    resumes = any(line.get("event") == "start" for line in lines)
    if resumes and (pinned or recorded > here or os.environ.get("OMP_NUM_THREADS")):
        changed = f"threads: {here}, and the run had {recorded}, {_DIGITS}"
        return here, changed if recorded != here else ""
    if pinned:
        return pinned, ""
    if resumes:
        return recorded, f"threads: {recorded}, as before" if recorded != here else ""
    others = 0.0 if os.environ.get("OMP_NUM_THREADS") else cores_of_others()
    free = min(here, max(1, round(here - others)))
    words = (
        f"threads: {free} of {here}, since other programs use {others:.1f} cores; the last digits of losses "
        "follow from the number, and --training.threads N pins it"
    )
    return free, words if free != here else ""
