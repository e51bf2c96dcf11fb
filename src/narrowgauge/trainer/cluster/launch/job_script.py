"""Scripts that start a run on a cluster and continue it after the time limit, for Slurm and for torchrun.

The script itself, with its reasons, is the template `job_script.sh.jinja`.
"""

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from narrowgauge.recipes import Recipe, choose_backend, named_device, recipe
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.cluster.launch.site import Limit, Site, slurm_word

MARK = "# written by narrowgauge launch"
GRACE_SECONDS = 120  # from the end of the first process to the end of the last


@dataclass(frozen=True, slots=True)
class Job:
    """The command to start, and its resources."""

    words: tuple[str, ...]  # arguments of `narrowgauge`: train ..., or for an array compare ...
    run: Path  # the run directory
    folder: Path  # the base of relative paths in `words`
    nodes: int = 1
    per_node: int = 1
    gpus: int = 1  # of a node; the processes share them evenly
    time: str = ""
    account: str = ""
    partition: str = ""
    array: int = 0  # jobs that share the runs of a compare; 0 for one job
    python: str = sys.executable


def job_script(job: Job, site: Site, slurm: bool) -> str:
    """The script that starts a job: by sbatch if `slurm`, else by bash on each node."""
    import jinja2  # here, for the time of --help

    jinja = jinja2.Environment(
        loader=jinja2.PackageLoader("narrowgauge", "trainer/cluster/launch"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # a script, whose values `quote` quotes
    )
    jinja.filters["quote"] = lambda value: shlex.quote(str(value))
    signal = site.slurm.signal_seconds
    if job.time:
        signal = min(signal, max(1, seconds_of(job.time) // 4))
    return jinja.get_template("job_script.sh.jinja").render(
        job=job,
        site=site,
        slurm=slurm,
        sbatch=_sbatch(job, site),
        signal=signal,
        command=shlex.join(["narrowgauge", *job.words]),
        mark=MARK,
        grace=GRACE_SECONDS,
    )


def _sbatch(job: Job, site: Site) -> list[str]:
    """The options that a job may have; sbatch takes them literally, without a shell."""
    options = {
        "gpus-per-node": job.gpus,
        "array": f"0-{job.array - 1}" if job.array else "",
        "cpus-per-task": site.slurm.cpus_per_task,
        "time": job.time,
        "account": slurm_word("--account", job.account) if job.account else site.slurm.account,
        "partition": slurm_word("--partition", job.partition) if job.partition else site.slurm.partition,
    }
    return [*(f"--{name}={value}" for name, value in options.items() if value), *site.slurm.options]


def queued(job: Job, site: Site) -> Job:
    """The job with the partition and the time limit that the site's limits give it.

    Without a time it gets the longest of a partition that takes its nodes; with one, the first partition
    that takes it. A partition without limits takes everything.
    """
    limits = [one for one in site.slurm.limit if job.partition in ("", one.partition)]
    if not limits:
        return job
    where = job.partition or "each partition"
    fitting: dict[str, Limit] = {}
    for one in limits:
        if job.nodes <= one.nodes:
            fitting.setdefault(one.partition, one)
    if not fitting:
        most = max(one.nodes for one in limits)
        raise UserError(f"--nodes is {job.nodes}, but {where} takes at most {most}; ask for fewer")
    longest = max(fitting.values(), key=lambda one: one.hours)
    if not job.time:
        return replace(job, partition=longest.partition, time=f"{longest.hours:02}:00:00")
    for one in fitting.values():
        if seconds_of(job.time) <= one.hours * 3600:
            return replace(job, partition=one.partition)
    raise UserError(
        f"--time is {job.time}, but {where} takes {job.nodes} nodes for at most {longest.hours} hours; ask "
        "for less: the job requeues itself, and the run continues"
    )


def seconds_of(time: str) -> int:
    """Convert Slurm's [DAYS-]HH:MM:SS, already validated, to seconds.

    >>> seconds_of("1-02:00:30")
    93630
    """
    days, _, clock = time.rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def emulation_note(found: Recipe, site: Site) -> str:
    """A sentence if the devices of a site emulate a recipe; "" if not, or if they are unknown."""
    try:
        device = named_device(site.architecture)
    except UserError:  # a site names its architecture for people, or not at all
        return ""
    if (backend := choose_backend(found, device)).name == "native":
        return ""
    wide = "bf16" if choose_backend(recipe("bf16"), device).name == "native" else "fp16"
    return (
        f"recipe {found.name} is emulated on {site.architecture}: {backend.reason}; --recipe {wide} is native"
    )
