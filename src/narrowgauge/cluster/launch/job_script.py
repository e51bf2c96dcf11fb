"""The common parts of launch scripts, which start a run on a cluster and requeue it at the time limit.

A time limit is not a failure. A few minutes before it, Slurm signals the script, the script signals the run,
and the run saves after its step and exits with 75. The job is requeued, and the same script continues the
run. A pitfall: a signal ends bash's `wait`, not the process, so a script with a single `wait` would abandon
its run during the save. It must wait again until the run has ended.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.cluster.launch.site import Site
from narrowgauge.errors import UserError
from narrowgauge.recipes import Recipe, choose_backend, named_device, recipe

MARK = "# written by narrowgauge launch"
GRACE_SECONDS = 120  # from the end of the first process to the end of the last


@dataclass(frozen=True, slots=True)
class Job:
    """The command to start, and its resources."""

    words: tuple[str, ...]  # arguments of `narrowgauge`: train ...
    run: Path  # the run directory
    folder: Path  # the base of relative paths in `words`
    nodes: int = 1
    per_node: int = 1
    gpus: bool = True
    time: str = ""
    account: str = ""
    partition: str = ""
    python: str = sys.executable


_SETTINGS = [
    "# An error, an unset variable or a failure inside a pipe ends the script.",
    "set -euo pipefail",
]

# A signal to the script is forwarded to the process in `child` as the signal in `forwarded`.
_FORWARD = [
    "asked='' sent='' child=''",
    "forward() {",
    "  woken=1 asked=$1",
    "  if [[ $child && ! $sent ]]; then # once: a second signal stops the run at once",
    "    sent=1",
    '    kill -s "$forwarded" "$child" 2>/dev/null || true',
    "  fi",
    "}",
    "trap 'forward USR1' USR1",
    "trap 'forward TERM' TERM",
]

# Placed after a command and `&`: stores its exit code in `status`, whatever signals arrive meanwhile.
_WAIT = [
    "child=$!",
    '[[ -z $asked ]] || forward "$asked" # asked while it was being started',
    "# A signal ends `wait`, not the run: wait again. 127 means that the status was already reported.",
    "status=127",
    "while",
    "  woken='' code=0",
    '  wait "$child" || code=$?',
    "  if [[ $code != 127 ]]; then status=$code; fi",
    "  [[ $woken ]]",
    "do :; done",
]


def script(header: Sequence[str], *parts: Sequence[str]) -> str:
    """A script of a header, the shell's settings and other parts, separated by empty lines."""
    return "\n\n".join("\n".join(part) for part in (header, _SETTINGS, *parts) if part) + "\n"


def supervised(start: Sequence[str], forwarded: str) -> list[str]:
    """Lines that `start` a process in the background and wait for its exit code in `status`.

    Meanwhile USR1 and TERM are forwarded to the process as the signal `forwarded`.
    """
    return [f"forwarded={forwarded}", *_FORWARD, *start, *_WAIT]


def title(site: Site, what: str) -> list[str]:
    """The title of the script and the sources of its values."""
    lines = [
        MARK,
        f"# {what}",
        f"# site: {site.title}{f' ({site.architecture})' if site.architecture else ''}",
    ]
    return [*lines, *(f"# {source}" for source in site.source)]


_CACHES = (
    "# compiled kernels on each node's own disk: a home directory on a file server would serve every process",
    "local_cache=/tmp/narrowgauge-$(id -un)",
    'export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$local_cache/triton}"',
    'export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$local_cache/inductor}"',
)


def setup(job: Job, site: Site) -> list[str]:
    """Setup lines: the site's lines and variables, the Python interpreter, the working directory."""
    lines = []
    if site.setup:
        lines += ["# the site's own lines", *site.setup]
    for variable in site.environment:
        if variable.why:
            lines.append(f"# {variable.why}")
        lines.append(f"export {variable.name}={shlex.quote(variable.value)}")
    return [
        *lines,
        *_CACHES,
        "# the Python that wrote this script, unless PYTHON names another",
        f"PYTHON=${{PYTHON:-{shlex.quote(job.python)}}}",
        f"cd {shlex.quote(str(job.folder))}",
    ]


def command(job: Job) -> str:
    """The module and its arguments, quoted."""
    return shlex.join(["narrowgauge", *job.words])


def status_file(job: Job) -> str:
    """The path of the run's status.json, quoted."""
    return shlex.quote(str(job.run / "status.json"))


def emulation_note(found: Recipe, site: Site) -> str:
    """A sentence if the devices of a site emulate a recipe; "" if not, or if they are unknown."""
    try:
        device = named_device(site.architecture)
    except UserError:  # a site names its architecture for people, or not at all
        return ""
    backend = choose_backend(found, device)
    if backend.name == "native":
        return ""
    wide = "bf16" if choose_backend(recipe("bf16"), device).name == "native" else "fp16"
    return (
        f"recipe {found.name} is emulated on {site.architecture}: {backend.reason}; --recipe {wide} is native"
    )
