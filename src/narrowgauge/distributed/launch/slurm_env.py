"""Expands Slurm's lists of hosts and of tasks of each node, and derives a port from the job's number.

Slurm writes `frontier[00123-00125,00200]` for four hosts and `8(x3),4` for the tasks of four nodes. Slurm
itself is not called: a process needs only its environment.

Source: https://slurm.schedmd.com/srun.html, section OUTPUT ENVIRONMENT VARIABLES.
"""

import re
from collections.abc import Iterator

from narrowgauge.errors import UserError

# Ports below Linux's ephemeral range (32768 and up), and above the ports of services.
_FIRST_PORT, _PORTS = 15000, 15000


def expand_hosts(text: str) -> Iterator[str]:
    """The hosts of a Slurm list, in its order, one at a time; a `UserError` if the list is malformed.

    >>> list(expand_hosts("login,rack[1-2]n[08-09]"))
    ['login', 'rack1n08', 'rack1n09', 'rack2n08', 'rack2n09']
    """
    if not re.fullmatch(r"(?!,)(?:[^\[\],\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]|,(?=[^,]))+", text):
        raise UserError(
            f"the list of hosts {text!r} is not in Slurm's form, such as node[01-04,07]; set MASTER_ADDR to "
            "the host of rank 0"
        )
    for name in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", text):
        yield from _expand(name)


def _expand(name: str) -> Iterator[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        yield name
        return
    ranges, _, after = rest.partition("]")
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for tail in _expand(after):
                yield f"{before}{number:0{len(first)}}{tail}"


def tasks_of_nodes(text: str) -> list[int]:
    """The number of tasks of each node; a `UserError` if the text is malformed.

    >>> tasks_of_nodes("8(x3),4")
    [8, 8, 8, 4]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise UserError(
                f"the tasks of each node, {text!r}, are not in Slurm's form, such as 8(x3),4; correct or "
                "unset SLURM_STEP_TASKS_PER_NODE and SLURM_TASKS_PER_NODE"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def port_of(job: int, step: int = 0) -> int:
    """A port that all ranks of a job compute independently; a different one for each step of the job."""
    return _FIRST_PORT + (job + 1009 * step) % _PORTS
