"""`doctor`: checks this machine. It does not import torch, which may be what is broken."""

import argparse

from rich.console import Console

from narrowgauge.cluster.doctor.doctor import as_json, examine, print_items


def run(options: argparse.Namespace) -> int:
    """Examine the machine and print the verdicts; returns 1 if something is missing, else 0."""
    verdicts = examine(options.data, options.tokenizer)
    if options.json:
        print(as_json(verdicts))
    else:
        print_items(verdicts, Console())
    return int(any(verdict.status == "MISS" for verdict in verdicts.values()))
