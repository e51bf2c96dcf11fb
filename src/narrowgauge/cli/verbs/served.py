"""`served`: compares a run with itself behind a server."""

import argparse
import json

from rich.console import Console

from narrowgauge.files import write_whole
from narrowgauge.report.page.served import served_page
from narrowgauge.runs.monitor.progress import Display
from narrowgauge.runs.use.served import EQUAL, served


def run_served(options: argparse.Namespace) -> int:
    """Print losses, differences and the verdict; the exit code is 1 if it is not `EQUAL`."""
    with Display(Console(stderr=True), 1, 1) as display:
        found = served(
            options.run,
            options.server,
            options.to,
            options.files,
            options.data,
            options.sequences,
            options.sequence_length,
            options.margin,
            display.stage,
        )
    if options.page is not None:
        write_whole(options.page, served_page(found))
    print(json.dumps(found.as_json(), indent=1) if options.json else found.table())
    return 0 if found.verdict == EQUAL else 1
