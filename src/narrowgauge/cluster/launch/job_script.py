"""A script that starts a run on a cluster, and brings it back when its time is up: what both kinds share.

A time limit is no failure. Slurm tells the script a few minutes before, the script tells the run, the run
saves after its step and exits with 75, and the job goes back into the queue, where the same script continues
the same run. The trap on that way: a signal ends bash's `wait`, not the process waited for, so that a script
with one `wait` leaves its run alone in the middle of the save. It has to wait again, until that has ended.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.cluster.launch.site import Site

MARK = "# written by narrowgauge launch"
GRACE_SECONDS = 120  # from the end of the first process to that of the last


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be started, and on how much."""

    words: tuple[str, ...]  # of `narrowgauge`: train ...
    run: Path  # its run directory
    folder: Path  # where the paths of `words` begin
    nodes: int = 1
    per_node: int = 1
    gpus: bool = True
    time: str = ""
    account: str = ""
    partition: str = ""
    python: str = sys.executable


# How each begins.
SETTINGS = [
    "# An error, an unset variable or a failure inside a pipe ends the script.",
    "set -euo pipefail",
]

# A signal to the script goes to the process in `child`, as the signal in `forwarded`.
FORWARD = [
    "asked='' sent='' child=''",
    "forward() {",
    "  woken=1 asked=$1",
    "  if [[ $child && ! $sent ]]; then # once: to be told twice is to stop at once",
    "    sent=1",
    '    kill -s "$forwarded" "$child" 2>/dev/null || true',
    "  fi",
    "}",
    "trap 'forward USR1' USR1",
    "trap 'forward TERM' TERM",
]

# After a command and `&`: its exit code comes into `status`, whatever signals arrive meanwhile.
WAIT = [
    "child=$!",
    '[[ -z $asked ]] || forward "$asked" # asked while it was being started',
    "# A signal ends `wait`, not the run: wait again. 127 says that the status has been told already.",
    "status=127",
    "while",
    "  woken='' code=0",
    '  wait "$child" || code=$?',
    "  if [[ $code != 127 ]]; then status=$code; fi",
    "  [[ $woken ]]",
    "do :; done",
]


def joined(*parts: Sequence[str]) -> str:
    """The script of these parts, an empty line between."""
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def title(site: Site, what: str) -> list[str]:
    """What the script is, and where its values come from."""
    lines = [
        MARK,
        f"# {what}",
        f"# site: {site.title}{f' ({site.architecture})' if site.architecture else ''}",
    ]
    return [*lines, *(f"# {source}" for source in site.source)]


def setup(job: Job, site: Site) -> list[str]:
    """The site's lines and variables, the Python, the folder."""
    lines = []
    if site.setup:
        lines += ["# the site's own lines", *site.setup]
    for variable in site.environment:
        if variable.why:
            lines.append(f"# {variable.why}")
        lines.append(f"export {variable.name}={shlex.quote(variable.value)}")
    return [
        *lines,
        "# the Python that wrote this script, unless PYTHON names another",
        f"PYTHON=${{PYTHON:-{shlex.quote(job.python)}}}",
        f"cd {shlex.quote(str(job.folder))}",
    ]


def command(job: Job) -> str:
    """The module and its words, quoted."""
    return shlex.join(["narrowgauge", *job.words])


def status_file(job: Job) -> str:
    """Where the run says how it ended, quoted."""
    return shlex.quote(str(job.run / "status.json"))
