"""`bench`: measures a step, verifies its values, reads files of findings."""

import argparse
import json
from pathlib import Path

from rich.console import Console

from narrowgauge.bench import bench
from narrowgauge.bench.answer import find
from narrowgauge.bench.peers import check_peers
from narrowgauge.bench.read import in_words, is_right, read
from narrowgauge.cli.ending import EXIT_DONE, EXIT_FAILED
from narrowgauge.cli.parsing.options import config_values
from narrowgauge.errors import UserError
from narrowgauge.files import write_whole
from narrowgauge.runs import choose_device
from narrowgauge.training import Config, make_config


def run(options: argparse.Namespace) -> int | None:
    """Measure, verify or read, and print; returns 1 if a verified value differs."""
    if options.read is not None:
        found = read(options.read)
        for line in in_words(found):
            Console().print(line, highlight=False, markup=False, soft_wrap=True)
        return EXIT_DONE if is_right(found) else EXIT_FAILED
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
