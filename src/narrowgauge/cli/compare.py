"""`compare`: recipes, variants, a grid and seeds in; verdicts and a page out."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from narrowgauge.cli.parsing.options import config_values, key_names, positive_integer
from narrowgauge.distributed import world_from
from narrowgauge.errors import UserError
from narrowgauge.experiment.arms import choose_arms, require_order, take_arms, take_experiment
from narrowgauge.experiment.compare import compare
from narrowgauge.experiment.design import Ladder, make_ladder
from narrowgauge.experiment.gate import Gate, gate_results, parse_gate
from narrowgauge.experiment.grid import (
    Point,
    make_points,
    parse_sweeps,
    parse_variant,
    recipe_variants,
    take_sweep,
)
from narrowgauge.experiment.power import power_text
from narrowgauge.experiment.run import run_ladder
from narrowgauge.models import count_block_weights
from narrowgauge.report import print_comparison, read_runs, write_report
from narrowgauge.report.verdict.rule import is_control
from narrowgauge.report.verdict.verdict import paired_gaps
from narrowgauge.runs.loop.check_data import check_vocabulary
from narrowgauge.runs.monitor.provenance import command_line
from narrowgauge.runs.run_directory import RunDirectory
from narrowgauge.training import make_config


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
    p.add_argument(
        "--rungs",
        metavar="STEPS,...",
        help="measure each at several lengths, each with its own fall of the learning rate, from one trunk",
    )
    p.add_argument("--arms", default="", metavar="A,B", help="only these arms of the file's table [arms]")
    p.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=A,B,...",
        help="every value of a key, as in optimizer.lr=1e-3,2e-3; may be given several times",
    )
    p.add_argument("--jobs", type=positive_integer, metavar="N", help="runs side by side (1)")
    p.add_argument("--dry-run", action="store_true", help="say runs, tokens and hours, and end")


def run(options: argparse.Namespace) -> int:
    """Train each point that is not done yet; print the verdicts and write the page.

    Returns:
        The exit code: 1 if a run failed, or if there is a gate and a variant does not pass it.
    """
    gate = parse_gate(options.gate) if options.gate is not None else None
    plan = read_plan(options)
    rank = world_from(os.environ, 0).rank
    console = Console(quiet=rank > 0)
    points = [Point(c.trunk.name, c.trunk.config) for c in plan.chains] if isinstance(plan, Ladder) else plan
    for point in points:  # before the first of them is started
        check_vocabulary(point.config)
    if isinstance(plan, Ladder):
        return _ladder(plan, options, console, gate)
    out = options.out or Path("runs") / f"compare-{points[0].config.model.name}"
    _say_what_is_seen(points, out, console)
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


def read_plan(options: argparse.Namespace) -> Ladder | list[Point]:
    """What the options and the file ask for: a ladder, or runs that take turns.

    Raises:
        UserError: something in them is wrong.
    """
    names = key_names()
    values, grid = take_sweep(config_values(options))
    grid |= parse_sweeps(options.sweep, names)
    values, arms = take_arms(values)
    values, table = take_experiment(values)
    require_order(table, arms)
    swept = [arm for arm in choose_arms(arms, options.arms) if not arm.keys.keys() & grid.keys()]
    variants = recipe_variants(options.recipes) + swept  # an arm that sets a swept key has no place in it
    variants += [parse_variant(text, names) for text in options.variant]
    seeds = options.seeds or "".join(f"{seed}," for seed in table.get("seeds", []))
    if not (options.rungs or table or options.jobs or options.dry_run):
        return make_points(values, variants, grid, seeds)
    if options.rungs:
        words = options.rungs.split(",")
        table["rungs"] = [int(word) if word.strip().isdecimal() else word for word in words]
    table.setdefault("rungs", [make_config(values).training.steps])
    if options.jobs:
        table["jobs"] = options.jobs
    return make_ladder(values, variants, grid, seeds, table)


def _ladder(ladder: Ladder, options: argparse.Namespace, console: Console, gate: Gate | None) -> int:
    """Train a ladder in processes of its own, or say what it would take."""
    if gate is not None and not options.dry_run:
        raise UserError("--gate judges runs of one length that take turns; leave out --rungs and --jobs")
    if world_from(os.environ, 0).size > 1:
        raise UserError("--rungs and --jobs start processes themselves; start compare without a launcher")
    out = options.out or Path("runs") / f"ladder-{ladder.chains[0].trunk.config.model.name}"
    run_ladder(ladder, out, console, options.dry_run)
    return 0


def _say_what_is_seen(points: Sequence[Point], out: Path, console: Console) -> None:
    """Print which gap the plan will be able to show."""
    t = points[0].config.training
    tokens = t.steps * t.batch_size * points[0].config.data.sequence_length
    parameters = count_block_weights(points[0].config.spec.model)
    seeds = {point.config.training.seed for point in points}
    names = list(dict.fromkeys(p.name.removesuffix(f"-seed-{p.config.training.seed}") for p in points))
    arms = [name for name in names[1:] if not is_control(name, names[0])]
    there = [out / point.name for point in points if RunDirectory(out / point.name).status() == "done"]
    gaps = paired_gaps(read_runs(there)) if there else {}
    text = power_text(len(seeds), len(arms), tokens, parameters, gaps)
    console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
