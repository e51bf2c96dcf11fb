"""`advise`: the line that trains a model best on a machine."""

import argparse
import json
import sys

from rich.console import Console

from narrowgauge.laboratory.advise.advise import advise


def run(options: argparse.Namespace) -> int:
    """Print the answers; the exit code is 1 if there is none."""
    progress = Console(stderr=True, quiet=options.json or not sys.stderr.isatty())
    found = advise(
        options.model,
        options.cluster,
        options.tokens,
        hours=options.hours,
        money=options.money,
        devices=options.devices,
        recipes=[name.strip() for name in (options.recipes or "").split(",") if name.strip()],
        price=options.price,
        sequence_length=options.sequence_length,
        batch_size=options.batch_size,
        data=options.data,
        show=progress.print,
    )
    if options.json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        print(found.table())
    return 0 if found.answers else 1
