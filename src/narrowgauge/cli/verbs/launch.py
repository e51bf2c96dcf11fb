"""`launch`: writes a script that starts a run on a cluster."""

import argparse
import re
from pathlib import Path

from narrowgauge.cli.line import read_line
from narrowgauge.cli.parsing.options import config_values
from narrowgauge.cluster import (
    MARK,
    Job,
    Site,
    emulation_note,
    job_script,
    load_site,
    queued,
)
from narrowgauge.data import why_absent
from narrowgauge.errors import UserError, unknown
from narrowgauge.runs import Layout, default_out, lay_out
from narrowgauge.training import make_config


def run(options: argparse.Namespace) -> None:
    """Write the script and print the line that starts it."""
    words = _words(options)
    site = load_site(options.site) if options.site else Site(devices_per_node=1)
    _check_slurm(options)
    job, layout = _job(options, words, site)
    job = queued(job, site) if options.slurm else job
    _write(options.out, job_script(job, site, options.slurm))
    if options.slurm:
        how = f"start it by: sbatch {options.out}"
    elif job.nodes == 1:
        how = f"start it by: bash {options.out}"
    else:
        how = f"on each node: MASTER_ADDR=HOST NODE_RANK=0..{job.nodes - 1} bash {options.out}"
    print(f"{options.out}: {how}")
    print(_grid(job, layout))
    if options.slurm:
        print(_queue(job, site))
    data = layout.config.data
    absent = why_absent(data.source, data.weights)
    here = absent and f"WARNING on this machine, {absent}"
    for text in (layout.choice, emulation_note(layout.config.spec.recipe, site), here):
        if text:
            print(text)


def _grid(job: Job, layout: Layout) -> str:
    """A line about the processes that the script starts, and the share of work of each."""
    dims, t = layout.parallel_dims, layout.config.training
    axes = f" ({dims.text})" if dims.text else ""
    share = t.batch_size // dims.data
    return (
        f"processes: {job.nodes} x {job.per_node}{axes}; sequences of each in a step: {share}, "
        f"{t.micro_batch_size} at once"
    )


def _queue(job: Job, site: Site) -> str:
    """A line about how long Slurm lets a job run, where, and who pays."""
    limit = f"jobs of at most {job.time}" if job.time else "jobs of the default time limit (--time)"
    where = f" in partition {partition}" if (partition := job.partition or site.slurm.partition) else ""
    paid = job.account or site.slurm.account
    return f"{limit}{where}, charged to {paid or 'your default account, if you have one (--account)'}"


def _check_slurm(options: argparse.Namespace) -> None:
    for name in ("time", "account", "partition"):
        if options.torchrun and getattr(options, name):
            raise UserError(f"--{name} is Slurm's; leave it out with --torchrun, or write --slurm")
    if options.time and not re.fullmatch(r"(\d{1,3}-)?\d{1,3}:[0-5]\d:[0-5]\d", options.time):
        raise UserError(f"--time is {options.time!r}; write HH:MM:SS, or D-HH:MM:SS")


def _job(options: argparse.Namespace, words: list[str], site: Site) -> tuple[Job, Layout]:
    """The job that the script starts, and its layout over the processes; checks every option."""
    line = read_line(words)
    config, out = make_config(config_values(line)), line.out
    per_node = site.devices_per_node if options.gpus_per_node is None else options.gpus_per_node
    for name, count in (("--nodes", options.nodes), ("--gpus-per-node", per_node)):
        if not 1 <= count <= 100_000:
            raise UserError(f"{name} is {count}; it must be from 1 to 100,000")
    gpus = config.training.device != "cpu"
    if options.site and gpus and per_node > site.devices_per_node:
        raise UserError(
            f"--gpus-per-node is {per_node}, but a node of {options.site} has {site.devices_per_node} "
            "devices and each process needs its own; start fewer"
        )
    run = out or default_out(config)
    layout = lay_out(config, options.nodes * per_node, run)
    job = Job(
        words=tuple(words),
        run=run,
        folder=Path.cwd(),
        nodes=options.nodes,
        per_node=per_node,
        gpus=gpus,
        time=options.time,
        account=options.account,
        partition=options.partition,
    )
    return job, layout


def _words(options: argparse.Namespace) -> list[str]:
    """The arguments of `train`; the most likely mistakes are refused here, before argparse sees them."""
    words: list[str] = options.words
    if words[:1] != ["--"] and words and words[0].startswith("-"):
        raise unknown("option", words[0].split("=")[0], options.parser._option_string_actions)
    if not (options.slurm or options.torchrun):
        raise UserError("launch writes a script for one of two starters; add --slurm or --torchrun")
    if options.out is None:
        raise UserError("launch writes a file; name it by --out SCRIPT")
    words = words[1:] if words[:1] == ["--"] else words
    if words[:1] != ["train"]:
        raise UserError(
            "launch starts 'train' alone; write it after --, as in: launch --slurm --out s.sh -- train"
        )
    return words


def _write(path: Path, text: str) -> None:
    """Write an executable file; only an older script of this verb is overwritten."""
    if path.exists() and (path.is_dir() or MARK.encode() not in path.read_bytes()[:4096]):
        raise UserError(f"{path} exists and is not from launch; name another file by --out, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
