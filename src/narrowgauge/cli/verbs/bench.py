"""`bench`: is it right, how fast is a step, and how fast could it be; or what it costs on a GPU elsewhere."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from narrowgauge.bench import bench
from narrowgauge.bench.answer import Answer
from narrowgauge.bench.count_table import print_count
from narrowgauge.bench.peers import check_peers
from narrowgauge.bench.verify import verify
from narrowgauge.cli.ending import EXIT_DONE, EXIT_FAILED
from narrowgauge.cli.parsing.options import config_values
from narrowgauge.cluster.plan.cluster_spec import cluster_names, load_cluster
from narrowgauge.cluster.plan.counted import speeds_of
from narrowgauge.devices import Device
from narrowgauge.errors import UserError
from narrowgauge.files import write_whole
from narrowgauge.kernels import has_kernels
from narrowgauge.recipes import device_facts, named_device
from narrowgauge.runs import choose_device
from narrowgauge.simulate import H200, Speeds, count_step
from narrowgauge.training import Config, make_config


def run(options: argparse.Namespace) -> int | None:
    """Measure, verify or count, and print; 1 if what was verified differs."""
    if options.count is not None:
        if options.verify:
            raise UserError("--verify and --count exclude each other: what is verified has to be here")
        _count(options)
        return None
    if not options.rounds.isdecimal() or (int(options.rounds) < 1 and not options.verify):
        raise UserError(f"--rounds {options.rounds}: it is a whole number above 0")
    peers = None
    if options.peers is not None:
        peers = [name.strip() for name in options.peers.split(",") if name.strip() not in ("", "none")]
    config, rounds, console = make_config(config_values(options)), int(options.rounds), Console()
    if options.verify:
        return _verify(config, peers, rounds, options.json or Path("answer.json"), console)
    result = bench(config, peers, rounds, console)
    if options.json:
        write_whole(options.json, json.dumps(result.as_json(), indent=2) + "\n")
    return None


def _verify(config: Config, peers: list[str] | None, rounds: int, file: Path, console: Console) -> int:
    """Verify, then measure and count; the files are written after each part."""
    device = choose_device(config.training.device)
    if peers is not None:
        check_peers(peers, device)
    answer = Answer(verify(device, console))
    page = answer.write(file)
    if rounds:
        console.print()
        answer = replace(answer, measured=bench(config, peers, rounds, console))
        answer.write(file)
        if device.type == "cuda" and has_kernels(device) and not config.training.compile:
            replace(answer, counted=count_step(config, *_gpu(""))).write(file)
    console.print(f"all figures: {file}, {page}", highlight=False, markup=False, soft_wrap=True)
    return EXIT_DONE if answer.verdict.is_right else EXIT_FAILED


def _count(options: argparse.Namespace) -> None:
    config = make_config(config_values(options))
    count = count_step(config, *_gpu(options.count))
    print_count(count, f"{config.model.name}, recipe {config.recipe.name}", Console())
    if options.json:
        about = {"model": config.model.name, "recipe": config.recipe.name}
        write_whole(options.json, json.dumps(about | count.as_json(), indent=2) + "\n")


def _gpu(name: str) -> tuple[Device, Speeds]:
    """The facts and speeds of a GPU by name; without a name those of the one that is here, or of an H200."""
    if not name and torch.cuda.is_available():
        return device_facts(torch.device("cuda")), H200
    name = name or "h200"
    if name not in cluster_names() or name == "h200":
        return named_device(name), H200
    cluster = load_cluster(name)
    return cluster.facts, speeds_of(cluster)
