"""The door of `narrowgauge doctor`: what is wrong with this machine."""

import argparse

from rich.console import Console

from narrowgauge.cluster import as_json, examine, print_items

HELP = "what is wrong with this machine, and how to mend it; exit code 1 if something is missing"


def add_options(p: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    p.add_argument("--json", action="store_true", help="a list of {item, status, found, mend}")
    p.add_argument("--data", metavar="SOURCE", help="look at this data too: whatever train --data takes")
    p.add_argument("--tokenizer", metavar="T", help="look at this tokenizer too: bytes, bpe-N, or its file")


def run(options: argparse.Namespace) -> int:
    """Examine the machine and say what was found; 1 if something is missing, else 0."""
    items = examine(options.data, options.tokenizer)
    if options.json:
        print(as_json(items))
    else:
        print_items(items, Console())
    return int(any(item.status == "MISS" for item in items))
