"""`served`: compares a run with itself behind a server."""

import argparse
import json
from html import escape

from rich.console import Console

from narrowgauge.files import write_whole
from narrowgauge.report.page.plain_page import plain_page
from narrowgauge.runs.monitor.progress import Display
from narrowgauge.runs.use.served import EQUAL, served


def run_served(options: argparse.Namespace) -> int:
    """Print losses, differences and the verdict; the exit code is 1 if it is not `EQUAL`."""
    with Display(Console(stderr=True), 1, 1) as display:
        o = options
        what, how = (o.run, o.server, o.to, o.files, o.data), (o.sequences, o.sequence_length, o.margin)
        found = served(*what, *how, display.stage)
    if options.page is not None:
        title = f"Server and trainer: {found.verdict}"
        parts = [f"<h1>{title}</h1>", f"<pre>{escape(found.table())}</pre>"]
        write_whole(options.page, plain_page(title, parts))
    print(json.dumps(found.as_json(), indent=1) if options.json else found.table())
    return 0 if found.verdict == EQUAL else 1
