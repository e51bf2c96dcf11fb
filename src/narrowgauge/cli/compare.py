"""`compare`: recipes, variants, a grid and seeds in; verdicts and a page out."""

import argparse
import os
from pathlib import Path

from rich.console import Console

from narrowgauge.cli.parsing.options import config_values, key_names
from narrowgauge.distributed import world_from
from narrowgauge.report import print_comparison, read_runs, write_report
from narrowgauge.report.compare.compare import compare
from narrowgauge.report.compare.gate import gate_results, parse_gate
from narrowgauge.report.compare.grid import make_points, parse_variant, recipe_variants, take_sweep
from narrowgauge.training.monitor.provenance import command_line
from narrowgauge.training.run.check_data import check_vocabulary
from narrowgauge.training.run_directory import RunDirectory


def add_options(p: argparse.ArgumentParser) -> None:
    """Add the options of the verb, without the configuration's."""
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
    p.add_argument(
        "--gate",
        metavar="GAP",
        help="accept a variant within this gap: nats, as 0.01, or percent, as 0.25%%; exit code 1 if not",
    )


def run(options: argparse.Namespace) -> int:
    """Train each point that is not done yet; print the verdicts and write the page.

    Returns:
        The exit code: 1 if a run failed, or if there is a gate and a variant does not pass it.
    """
    gate = parse_gate(options.gate) if options.gate is not None else None
    values, grid = take_sweep(config_values(options))
    names = key_names()
    variants = recipe_variants(options.recipes)
    variants += [parse_variant(text, names) for text in options.variant]
    points = make_points(values, variants, grid, options.seeds)
    rank = world_from(os.environ, 0).rank
    for point in points:  # before the first of them is started
        check_vocabulary(point.config)
    console = Console(quiet=rank > 0)
    out = options.out or Path("runs") / f"compare-{points[0].config.model.name}"
    paths = compare(points, out, console, rank)
    failed = [path.name for path in paths if RunDirectory(path).status() == "failed"]
    results = [] if gate is None else gate_results(read_runs(paths), gate)
    code = 1 if failed or any(result.word != "pass" for result in results) else 0
    if rank:  # the first of several processes reports for all
        return code
    report = write_report(paths, out / "report.html", command_line())
    runs = read_runs(paths)
    print_comparison(runs, console)
    for result in results:
        line = f"gate {gate}: {result.name} {result.word}; {result.reason}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if failed:
        line = f"{len(failed)} of {len(paths)} runs failed: {', '.join(failed)}; the same line tries again"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)
    return code
