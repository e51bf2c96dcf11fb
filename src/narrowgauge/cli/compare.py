"""The door of `narrowgauge compare`: recipes, variants, a grid and seeds in; verdicts and a page out."""

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from narrowgauge.distributed import world_from
from narrowgauge.report import print_comparison, print_verdicts, read_runs, write_report
from narrowgauge.report.compare.compare import compare
from narrowgauge.report.compare.grid import parse_variant, points, recipe_variants, take_sweep
from narrowgauge.report.compare.verdict import groups

HELP = "train the same model under several recipes, settings and seeds, side by side"
ReadValues = Callable[[argparse.Namespace], dict[str, dict[str, Any]]]


def add_options(p: argparse.ArgumentParser, values: ReadValues, short: Mapping[str, str]) -> None:
    """The options of the verb; `values` reads those of `train`, `short` are its short options by name."""
    p.add_argument("--recipes", default="", metavar="A,B,C", help="recipes; the first is the reference")
    p.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,...",
        help="a run with other values of any keys, under a name; may be given several times",
    )
    p.add_argument(
        "--seeds",
        default="",
        metavar="N|A,B,C",
        help="how many seeds each is trained with, or which (the one of --seed)",
    )
    p.set_defaults(values=values, short=short)


def run(options: argparse.Namespace) -> None:
    """Train what is not trained yet, and say what came of it."""
    values, grid = take_sweep(options.values(options))
    variants = recipe_variants(options.recipes)
    variants += [parse_variant(text, options.short) for text in options.variant]
    found = points(values, variants, grid, options.seeds)
    rank = world_from(os.environ, 0).rank
    console = Console(quiet=rank > 0)
    out = options.out or Path("runs") / f"compare-{found[0].config.model.name}"
    paths = compare(found, out, console, rank)
    if rank:  # the first of several processes reports for all
        return
    report = write_report(paths, out / "report.html")
    runs = read_runs(paths)
    if len(groups(runs)) == len(runs):  # of several seeds the verdicts say it all
        print_comparison(runs, console)
    print_verdicts(runs, console)
    console.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)
