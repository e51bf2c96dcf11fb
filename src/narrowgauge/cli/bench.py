"""`bench`: how fast a step is, and how fast it could be; or what it costs on a GPU that is not here."""

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console

from narrowgauge.bench import bench
from narrowgauge.bench.count import H200, Speeds, count_step, print_count
from narrowgauge.cli.parsing.options import config_values
from narrowgauge.cluster.plan.cluster_spec import cluster_names, load_cluster
from narrowgauge.devices import Device
from narrowgauge.errors import UserError
from narrowgauge.files import write_whole
from narrowgauge.recipes import device_facts, named_device
from narrowgauge.training import make_config


def add_options(p: argparse.ArgumentParser) -> None:
    """Add the options of the verb, without the configuration's."""
    p.add_argument("--rounds", metavar="N", default="5", help="how often each takes its turn (5)")
    p.add_argument("--peers", metavar="A,B", help="whom to time beside it; none: only the own step")
    p.add_argument(
        "--count",
        metavar="GPU",
        nargs="?",
        const="",
        help="count a step on a GPU that is not here (h200)",
    )
    p.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")


def run(options: argparse.Namespace) -> None:
    """Measure or count, and print."""
    if options.count is not None:
        _count(options)
        return
    if not options.rounds.isdecimal() or int(options.rounds) < 1:
        raise UserError(f"--rounds {options.rounds}: it is a whole number above 0")
    peers = None
    if options.peers is not None:
        peers = [name.strip() for name in options.peers.split(",") if name.strip() not in ("", "none")]
    result = bench(make_config(config_values(options)), peers, int(options.rounds), Console())
    if options.json:
        write_whole(options.json, json.dumps(result.as_json(), indent=2) + "\n")


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
    here, there = load_cluster("h200"), load_cluster(name)
    alike = {"bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "fp4": "fp4"}  # those of an H200: as FP8
    products = {
        kind: there.speed(f) / here.speed(f if f in here.peak else "fp8")
        for kind, f in alike.items()
        if f in there.peak
    }
    memory = there.memory_bandwidth / here.memory_bandwidth
    words = f"an H200's, in the proportion of data sheets to {there.device}"
    return there.facts, H200.scaled(words, memory, products)
