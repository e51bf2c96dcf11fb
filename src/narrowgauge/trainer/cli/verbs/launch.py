"""`launch`: writes a script that starts a run on a cluster."""

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from narrowgauge.system.errors import UserError
from narrowgauge.trainer import data  # each name is imported when it is used
from narrowgauge.trainer.cli.line import parser_of, read_line
from narrowgauge.trainer.cluster.launch.job_script import MARK, Job, emulation_note, job_script, queued
from narrowgauge.trainer.cluster.launch.site import Site, load_site, site_names
from narrowgauge.trainer.laboratory.arguments import Form, config_values

if TYPE_CHECKING:
    from narrowgauge.trainer.runs import Layout

_REST = Form("-- train ...", str, is_positional=True, nargs=argparse.REMAINDER)


def launch(
    *,
    slurm: Annotated[bool, "for sbatch: srun starts one process per device"] = False,
    torchrun: Annotated[bool, "to run on each node, without a scheduler"] = False,
    nodes: Annotated[int, Form("N"), "number of nodes"] = 1,
    gpus_per_node: Annotated[int | None, Form("G"), "processes per node (the site's, or 1)"] = None,
    site: Annotated[str | None, Form("NAME"), f"{', '.join(site_names())} or a .toml file"] = None,
    time: Annotated[str, Form("HH:MM:SS"), "Slurm: time limit, or D-HH:MM:SS (the site's)"] = "",
    account: Annotated[str, Form("A"), "Slurm: account (the site's)"] = "",
    partition: Annotated[str, Form("P"), "Slurm: partition (the site's)"] = "",
    array: Annotated[int, Form("N"), "Slurm: N jobs of one node that share the runs of a compare"] = 0,
    out: Annotated[Path | None, Form("SCRIPT"), "the script"] = None,
    words: Annotated[list[str], _REST, "the command to start"],
) -> None:
    """Write a script that starts a run on a cluster.

    narrowgauge launch --torchrun --gpus-per-node 8 --out run.sh -- train my.toml
    narrowgauge launch --slurm --array 16 --out compare.sh -- compare --recipes bf16,fp8 --seeds 8
    """
    if words[:1] != ["--"] and words and words[0].startswith("-"):
        raise parser_of("launch").unknown_argument(words[0])
    if slurm == torchrun:
        way = "add --slurm or --torchrun" if not slurm else "--torchrun is not allowed with --slurm"
        raise UserError(f"launch writes a script for one of two starters; {way}")
    if out is None:
        raise UserError("launch writes a file; name it by --out SCRIPT")
    words = words[1:] if words[:1] == ["--"] else words
    if words[:1] != ["compare" if array else "train"]:
        raise UserError(
            "launch starts 'train' alone, or 'compare' with --slurm --array N; write it after --, as in: "
            "launch --slurm --out s.sh -- train"
        )
    if array and (nodes > 1 or not 0 < array <= 1000):
        raise UserError(f"--array is {array} with --nodes {nodes}; each of 1 to 1000 tasks has one node")
    for name, value in {"time": time, "account": account, "partition": partition, "array": array}.items():
        if torchrun and value:
            raise UserError(f"--{name} is Slurm's; leave it out with --torchrun, or write --slurm")
    if time and not re.fullmatch(r"(\d{1,3}-)?\d{1,3}:[0-5]\d:[0-5]\d", time):
        raise UserError(f"--time is {time!r}; write HH:MM:SS, or D-HH:MM:SS")
    place = load_site(site) if site else Site(devices_per_node=1)
    job, layout = _job(words, place, nodes, gpus_per_node, site, array)
    if slurm:
        job = queued(replace(job, time=time, account=account, partition=partition), place)
    _write(out, job_script(job, place, slurm))
    if slurm:
        how = f"start it by: sbatch {out}"
    elif job.nodes == 1:
        how = f"start it by: bash {out}"
    else:
        how = f"on each node: MASTER_ADDR=HOST NODE_RANK=0..{job.nodes - 1} bash {out}"
    print(f"{out}: {how}")
    print(_grid(job, layout))
    if slurm:
        print(_queue(job, place))
    source = layout.config.data
    absent = data.why_absent(source.source, source.weights)
    here = absent and f"WARNING on this machine, {absent}"
    for text in (layout.choice, emulation_note(layout.config.spec.recipe, place), here):
        if text:
            print(text)


def _job(
    words: list[str], site: Site, nodes: int, per_node: int | None, named: str | None, array: int
) -> tuple[Job, "Layout"]:
    """The job that the script starts, and its layout over the processes; checks every option."""
    from narrowgauge.trainer.laboratory.compare import experiment_of
    from narrowgauge.trainer.runs import default_out, lay_out
    from narrowgauge.trainer.training import make_config

    line = read_line(words)
    if array:
        planned = experiment_of(
            config_values(line), line.recipes, line.variants, line.seeds, line.arms, line.rungs, line.jobs
        )
        config = planned.trunks[0].config
    else:
        config = make_config(config_values(line))
    count = site.devices_per_node if per_node is None else per_node
    for name, value in (("--nodes", nodes), ("--gpus-per-node", count)):
        if not 1 <= value <= 100_000:
            raise UserError(f"{name} is {value}; it must be from 1 to 100,000")
    gpus = count if config.training.device != "cpu" else 0
    if named and gpus and count > site.devices_per_node:
        raise UserError(
            f"--gpus-per-node is {count}, but a node of {named} has {site.devices_per_node} devices and "
            "each process needs its own; start fewer"
        )
    run = line.out or default_out(config)
    processes = 1 if array else count
    layout = lay_out(config, nodes * processes, run)
    job = Job(tuple(words), run, Path.cwd(), nodes, processes, gpus, array=array)
    return job, layout


def _grid(job: Job, layout: "Layout") -> str:
    """A line about the processes that the script starts, and the share of work of each."""
    if job.array:
        return f"{job.array} tasks share the runs; each takes one after the other, or as many as --jobs says"
    dims, t = layout.parallel_dims, layout.config.training
    axes = f" ({dims.text})" if dims.text else ""
    return (
        f"processes: {job.nodes} x {job.per_node}{axes}; sequences of each in a step: "
        f"{t.batch_size // dims.data}, {t.micro_batch_size} at once"
    )


def _queue(job: Job, site: Site) -> str:
    """A line about how long Slurm lets a job run, where, and who pays."""
    limit = f"jobs of at most {job.time}" if job.time else "jobs of the default time limit (--time)"
    where = f" in partition {partition}" if (partition := job.partition or site.slurm.partition) else ""
    paid = job.account or site.slurm.account
    return f"{limit}{where}, charged to {paid or 'your default account, if you have one (--account)'}"


def _write(path: Path, text: str) -> None:
    """Write an executable file; only an older script of this verb is overwritten."""
    if path.exists() and (path.is_dir() or MARK.encode() not in path.read_bytes()[:4096]):
        raise UserError(f"{path} exists and is not from launch; name another file by --out, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
