"""`bench`: measures a step, verifies its values, counts it for another GPU, reads files of findings."""

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console

from narrowgauge.bench import bench
from narrowgauge.bench.answer import find
from narrowgauge.bench.count_table import print_count
from narrowgauge.bench.peers import check_peers
from narrowgauge.bench.read import in_words, is_right, read
from narrowgauge.cli.ending import EXIT_DONE, EXIT_FAILED
from narrowgauge.cli.parsing.options import config_values
from narrowgauge.cluster.plan.cluster_spec import cluster_names, load_cluster
from narrowgauge.cluster.plan.counted import speeds_of
from narrowgauge.devices import Device
from narrowgauge.errors import UserError
from narrowgauge.files import write_whole
from narrowgauge.recipes import device_facts, named_device
from narrowgauge.runs import choose_device
from narrowgauge.simulate import H200, Speeds, count_step
from narrowgauge.training import Config, make_config


def run(options: argparse.Namespace) -> int | None:
    """Measure, verify, count or read, and print; returns 1 if a verified value differs."""
    if options.read is not None:
        found = read(options.read)
        for line in in_words(found):
            Console().print(line, highlight=False, markup=False, soft_wrap=True)
        return EXIT_DONE if is_right(found) else EXIT_FAILED
    if options.count is not None:
        if options.verify:
            raise UserError("--verify and --count exclude each other: --verify runs on this device")
        _count(options)
        return None
    if not options.rounds.isdecimal() or (int(options.rounds) < 1 and not options.verify):
        raise UserError(f"--rounds {options.rounds}: it must be a whole number above 0")
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
    device = choose_device(config.training.device)
    if peers is not None:
        check_peers(peers, device)
    training = config.training.model_copy(update={"device": str(device)})
    answer = find(config.model_copy(update={"training": training}), peers, rounds, file, console)
    page = file.with_suffix(".html")
    console.print(f"all figures: {file}, {page}", highlight=False, markup=False, soft_wrap=True)
    is_whole = answer.verdict is not None and answer.verdict.is_right and not answer.errors
    return EXIT_DONE if is_whole else EXIT_FAILED


def _count(options: argparse.Namespace) -> None:
    config = make_config(config_values(options))
    count = count_step(config, *_gpu(options.count))
    print_count(count, f"{config.model.name}, recipe {config.recipe.name}", Console())
    if options.json:
        about = {"model": config.model.name, "recipe": config.recipe.name}
        write_whole(options.json, json.dumps(about | count.as_json(), indent=2) + "\n")


def _gpu(name: str) -> tuple[Device, Speeds]:
    """The facts and speeds of a GPU by name; without a name, of the local GPU, else of an H200."""
    if not name and torch.cuda.is_available():
        return device_facts(torch.device("cuda")), H200
    name = name or "h200"
    if name not in cluster_names() or name == "h200":
        return named_device(name), H200
    cluster = load_cluster(name)
    return cluster.facts, speeds_of(cluster)
