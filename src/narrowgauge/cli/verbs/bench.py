"""`bench`: measures a step."""

import argparse
import json

from rich.console import Console

from narrowgauge.bench import bench
from narrowgauge.cli.parsing.options import config_values
from narrowgauge.errors import UserError
from narrowgauge.files import write_whole
from narrowgauge.training import make_config


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    if not options.rounds.isdecimal() or int(options.rounds) < 1:
        raise UserError(f"--rounds {options.rounds}: it must be a whole number above 0")
    peers = None
    if options.peers is not None:
        peers = [name.strip() for name in options.peers.split(",") if name.strip() not in ("", "none")]
    result = bench(make_config(config_values(options)), peers, int(options.rounds), Console())
    if options.json:
        write_whole(options.json, json.dumps(result.as_json(), indent=2) + "\n")
