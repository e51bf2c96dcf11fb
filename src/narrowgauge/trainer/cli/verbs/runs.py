"""`runs` lists the runs of a folder, `report` compares some on a page, and `watch` follows them there."""

import math
import sys
from pathlib import Path
from typing import Annotated

from narrowgauge.system.errors import UserError
from narrowgauge.trainer import report as reports  # each name is imported when it is used
from narrowgauge.trainer.laboratory.arguments import Console, File, Folder, Form

FOLDER = Path("runs")
_EXIT_INTERRUPTED = 130  # Ctrl-C is how a watcher ends


def runs(
    folder: Annotated[Folder, Form("DIR", is_positional=True), "where"] = FOLDER,
    *,
    json: Annotated[bool, "print a JSON list; a missing loss is null"] = False,
    console: Console,
) -> None:
    """List the runs in a folder, with state and loss.

    narrowgauge runs runs/
    """
    from json import dumps

    from rich.table import Table
    from rich.text import Text

    from narrowgauge.system.json_lines import strict_json

    if not folder.is_dir() and (folder.exists() or folder != FOLDER):
        state = "is not a directory" if folder.exists() else "does not exist"
        raise UserError(
            f"{folder} {state}; name a folder with run directories, as in: narrowgauge runs {FOLDER}"
        )
    found = reports.list_runs(folder)
    if json:
        print(dumps([strict_json(reports.as_json(one)) for one in found], indent=2))
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
    for one in map(reports.as_json, found):
        step = f"{one['step']:,}/{one['steps']:,}" if one["steps"] else f"{one['step']:,}"
        losses = (f"{x:.4f}" if math.isfinite(x) else "-" for x in (one["loss"], one["val_loss"]))
        table.add_row(*map(Text, (one["path"], one["state"], one["recipe"], step)), *losses)
    console.print(table)
    for run in found:
        if run.reason and run.status != "done":
            print(f"{run.path} {run.status}: {run.reason}")


def report(
    runs: Annotated[
        tuple[Path, ...], Form("RUN", is_positional=True), "run directories, the reference first"
    ],
    *,
    out: Annotated[Path | None, "the page (report.html in the first RUN)"] = None,
    expected: Annotated[bool, "compare each gap with its forecast"] = False,
    console: Console,
) -> None:
    """Write the HTML report of one or more runs.

    narrowgauge report runs/mine runs/other --out both.html
    """
    from narrowgauge.trainer.report.page.page import expected_section
    from narrowgauge.trainer.report.verdict.expected import expectations

    found = reports.read_runs(runs)
    beside = expectations(found) if expected else []
    page = reports.write_report(runs, out or runs[0] / "report.html", more=expected_section(beside))
    print(f"report: {page}")
    reports.print_comparison(found, console)
    for one in beside:
        print(one.text)


def watch(
    paths: Annotated[tuple[Path, ...], Form("PATH", is_positional=True)],
    *,
    out: Annotated[File | None, "the page (live.html in the first PATH)"] = None,
    once: Annotated[bool, "write the page as it is now, and end"] = False,
) -> int:
    """Show runs and comparisons on a live page.

    narrowgauge watch runs/mine
    narrowgauge watch runs/
    narrowgauge watch runs/compare-debug --once --out compared.html

    Args:
        paths: A run, a folder of compare, a folder of runs, or several runs, the reference first.
    """
    from narrowgauge.trainer.laboratory.watch import LIVE, follow, write_pages
    from narrowgauge.trainer.report.page.standing import subjects

    for path in paths:
        if path.is_file():
            raise UserError(f"{path} is a file; name a run directory, or a folder of runs or of compare")
        if not path.exists() and not path.resolve().parent.is_dir():
            raise UserError(f"{path.parent} does not exist; name a run directory, or where one will be")
    page = out or paths[0] / LIVE
    empty = [path for path in paths if not subjects([path])[0]]
    if once:
        if empty:
            raise UserError(
                f"{empty[0]} has no runs; name a run directory, or a folder of runs or of compare"
            )
        write_pages(paths, page)
        print(f"page: {page}")
        return 0
    for path in empty:
        state = "has no runs yet; the page waits for the first"
        state = state if path.exists() else "does not exist yet; the page waits for it"
        print(f"{path} {state}", file=sys.stderr)
    print(f"live page: {page.resolve().as_uri()} (Ctrl-C ends it)", flush=True)
    try:
        follow(paths, page)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0
