"""The launch script for Slurm: submitted by `sbatch`, with one process per device started by `srun`.

`--signal=B:USR1@300` sends USR1 to the script's shell alone, 300 seconds before the time limit. Two pitfalls:

- exit code 75 alone must not requeue a job: it may have been cancelled on purpose;
- srun must not kill the others when the first process ends (`--kill-on-bad-exit=0`): rank 0 may still be
  saving. But if one crashed, the others would wait for it forever: they get two minutes (`--wait=120`).

Sources: https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/srun.html ("Signals and Escape
Sequences": what srun forwards; `--cpus-per-task`: not inherited from sbatch since Slurm 22.05).
"""

import shlex
from dataclasses import replace

from narrowgauge.cluster.launch.job_script import (
    GRACE_SECONDS,
    Job,
    command,
    script,
    setup,
    supervised,
    title,
)
from narrowgauge.cluster.launch.site import Limit, Site, slurm_word
from narrowgauge.errors import UserError


def slurm_script(job: Job, site: Site) -> str:
    """The script for sbatch."""
    tasks = f"{job.nodes} nodes x {job.per_node} processes; start it, and continue it, by: sbatch this-script"
    return script(
        ["#!/bin/bash", *title(site, tasks), *_sbatch(job, site)],
        [
            "# The processes find their ranks in SLURM_PROCID and meet on the first host of SLURM_NODELIST,",
            "# at a port made from the job's id; what a shell has set for torchrun would contradict that.",
            "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT",
        ],
        setup(job, site),
        [
            "# srun forwards USR1 to every process.",
            *supervised(_srun(job, site), "USR1"),
        ],
        [
            "# Saved because the time was up, not because the job was cancelled: requeue it.",
            "if [[ $asked == USR1 && $status == 75 ]]; then",
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$status"',
        ],
    )


def queued(job: Job, site: Site) -> Job:
    """The job with the partition and the time limit that the site's limits give it.

    Without a time it gets the longest of a partition that takes its nodes; with one, the first partition
    that takes it. A partition without limits takes everything.

    Raises:
        UserError: The limits allow no such job.
    """
    limits = [one for one in site.limit if job.partition in ("", one.partition)]
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


def _sbatch(job: Job, site: Site) -> list[str]:
    """The lines that sbatch reads; sbatch takes them literally, without a shell."""
    account = slurm_word("--account", job.account) if job.account else site.account
    partition = slurm_word("--partition", job.partition) if job.partition else site.partition
    signal = site.signal_seconds
    if job.time:
        signal = min(signal, max(1, seconds_of(job.time) // 4))
    options = [
        "--job-name=narrowgauge",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.per_node}",
        f"--gpus-per-node={job.per_node}" if job.gpus else "",
        f"--cpus-per-task={site.cpus_per_task}" if site.cpus_per_task else "",
        f"--time={job.time}" if job.time else "",
        f"--account={account}" if account else "",
        f"--partition={partition}" if partition else "",
        *site.options,
    ]
    return [
        *(f"#SBATCH {option}" for option in options if option),
        "# a failing node requeues the job; its log continues in the same file",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"# {signal} s before the time limit: USR1 to this script (B), which forwards it",
        f"#SBATCH --signal=B:USR1@{signal}",
    ]


def _srun(job: Job, site: Site) -> list[str]:
    options = [
        f"--nodes={job.nodes}",
        f"--ntasks={job.nodes * job.per_node}",
        f"--ntasks-per-node={job.per_node}",
        f"--cpus-per-task={site.cpus_per_task}" if site.cpus_per_task else "",  # Slurm 22.05: not inherited
        "--distribution=block",
        "--kill-on-bad-exit=0",
        f"--wait={GRACE_SECONDS}",
        *(site.srun if job.gpus else ()),
    ]
    lines = [
        "# Ranks fill one node after the other. The first to end does not take the others with it: they may",
        f"# still be saving; {GRACE_SECONDS} s later it does.",
        *(f"  {shlex.quote(option)} \\" for option in options if option),
        f'  "$PYTHON" -u -m {command(job)} &',
    ]
    lines.insert(2, "srun \\")
    if site.gpu_per_task and job.gpus:
        why = "# Slurm shows each process one GPU; this variable declares that the GPU is its alone."
        lines = [why, "export SLURM_GPUS_PER_TASK=1", *lines]
    return lines


def seconds_of(time: str) -> int:
    """Convert Slurm's [DAYS-]HH:MM:SS, already validated, to seconds.

    >>> seconds_of("1-02:00:30")
    93630
    """
    days, _, clock = time.rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
