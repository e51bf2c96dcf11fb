"""`runs` lists the runs of a folder, `report` compares some on a page, and `watch` follows them there."""

import argparse
import json
import math
import sys
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowgauge.cli.options import FOLDER
from narrowgauge.errors import UserError
from narrowgauge.json_lines import strict_json
from narrowgauge.laboratory.watch import follow, live_page, write_pages
from narrowgauge.report import RunSummary, list_runs, print_comparison, read_runs, write_report
from narrowgauge.report.page.sections import expected_section
from narrowgauge.report.read.subject import subjects
from narrowgauge.report.verdict.expected import expectations

_EXIT_INTERRUPTED = 130  # Ctrl-C is how a watcher ends


def run_runs(options: argparse.Namespace) -> None:
    """Print a line for each run, and below the table why some of them failed or stopped."""
    folder = options.folder
    if not folder.is_dir() and (folder.exists() or folder != FOLDER):
        state = "is not a directory" if folder.exists() else "does not exist"
        raise UserError(
            f"{folder} {state}; name a folder with run directories, as in: narrowgauge runs {FOLDER}"
        )
    found = list_runs(folder)
    if options.json:
        print(json.dumps([_as_json(summary) for summary in found], indent=2))
        return
    if not found:
        print(f"no run directories in {folder}; 'narrowgauge train' makes one")
        return
    table = Table(box=None, header_style="bold")
    table.add_column("run", overflow="fold")
    for name in ("state", "recipe"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "loss", "val loss"):
        table.add_column(name, justify="right", no_wrap=True)
    for summary in found:
        step = f"{summary.step:,}/{summary.steps:,}" if summary.steps else f"{summary.step:,}"
        words = (str(summary.path), summary.state, summary.recipe, step)
        table.add_row(*map(Text, words), _loss(summary.loss), _loss(summary.val_loss))
    console = Console()
    console.print(table)
    for summary in found:
        if summary.reason and summary.state != "done":
            text = f"{summary.path} {summary.state}: {summary.reason}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "-"


def _as_json(summary: RunSummary) -> dict[str, object]:
    return strict_json(asdict(summary) | {"path": str(summary.path)})


def run_report(options: argparse.Namespace) -> None:
    """Write the page and print the comparison of the runs."""
    out = options.out or options.runs[0] / "report.html"
    runs = read_runs(options.runs)
    found = expectations(runs) if options.expected else []
    print(f"report: {write_report(options.runs, out, more=expected_section(found))}")
    print_comparison(runs, Console())
    for one in found:
        print(one.text)


def run_watch(options: argparse.Namespace) -> int:
    """Write the page once, or until all runs have ended, or Ctrl-C; returns the exit code."""
    paths, page = options.paths, live_page(options.paths, options.out)
    empty = [path for path in paths if not subjects([path])[0]]
    if options.once:
        if empty:
            raise UserError(
                f"{empty[0]} has no runs; name a run directory, or a folder of runs or of compare"
            )
        write_pages(paths, page)
        print(f"page: {page}")
        return 0
    for path in empty:
        state = "has no runs yet; the page waits for the first"
        print(
            f"{path} {state if path.exists() else 'does not exist yet; the page waits for it'}",
            file=sys.stderr,
        )
    print(f"live page: {page.resolve().as_uri()} (Ctrl-C ends it)", flush=True)
    try:
        follow(paths, page)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0
