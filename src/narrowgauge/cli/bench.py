"""`bench`: how fast a step is, and how fast it could be."""

import argparse
import json
from pathlib import Path

from rich.console import Console

from narrowgauge.bench import bench
from narrowgauge.cli.parsing.options import config_values
from narrowgauge.errors import UserError
from narrowgauge.files import write_whole
from narrowgauge.training import make_config


def add_options(p: argparse.ArgumentParser) -> None:
    """Add the options of the verb, without the configuration's."""
    p.add_argument("--rounds", metavar="N", default="5", help="how often each takes its turn (5)")
    p.add_argument("--peers", metavar="A,B", help="whom to time beside it; none: only the own step")
    p.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    if not options.rounds.isdecimal() or int(options.rounds) < 1:
        raise UserError(f"--rounds {options.rounds}: it is a whole number above 0")
    peers = None
    if options.peers is not None:
        peers = [name.strip() for name in options.peers.split(",") if name.strip() not in ("", "none")]
    result = bench(make_config(config_values(options)), peers, int(options.rounds), Console())
    if options.json:
        write_whole(options.json, json.dumps(result.as_json(), indent=2) + "\n")
