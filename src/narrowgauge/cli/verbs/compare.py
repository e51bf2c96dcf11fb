"""`compare`: trains recipes, variants, a grid and seeds, and reports verdicts and a page."""

import argparse
import os
from pathlib import Path

from rich.console import Console

from narrowgauge.cli.parsing.options import config_values, key_names
from narrowgauge.distributed import world_from
from narrowgauge.errors import UserError
from narrowgauge.experiment.arms import choose_arms, require_order, take_arms, take_experiment
from narrowgauge.experiment.design import Experiment, make_comparison, make_measured
from narrowgauge.experiment.gate import parse_gate
from narrowgauge.experiment.grid import parse_sweeps, parse_variant, recipe_variants, take_sweep
from narrowgauge.experiment.run import print_plan, run_experiment
from narrowgauge.runs.loop.check_data import check_vocabulary
from narrowgauge.runs.monitor.provenance import command_line
from narrowgauge.training import make_config


def run(options: argparse.Namespace) -> int:
    """Train each unfinished run; print the verdicts and write the page.

    Returns:
        The exit code: 1 if a run failed, or if there is a gate and a variant does not pass it.
    """
    gate = parse_gate(options.gate) if options.gate is not None else None
    experiment = read_plan(options)
    world = world_from(os.environ, 0)
    for run in experiment.runs:  # before the first one starts
        check_vocabulary(run.config)
    if experiment.is_measured and world.size > 1:
        raise UserError("--rungs and --jobs start processes themselves; start compare without a launcher")
    kind = "ladder" if experiment.is_measured else "compare"
    out = options.out or Path("runs") / f"{kind}-{experiment.runs[0].config.model.name}"
    console = Console(quiet=world.rank > 0)
    if options.dry_run:
        print_plan(experiment, out, console)
        return 0
    return run_experiment(experiment, out, console, world.rank, gate, command_line(), options.expected)


def read_plan(options: argparse.Namespace) -> Experiment:
    """The experiment that the options and the file specify.

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
    variants = recipe_variants(options.recipes) + swept  # an arm that sets a swept key is impossible
    variants += [parse_variant(text, names) for text in options.variant]
    seeds = options.seeds or "".join(f"{seed}," for seed in table.get("seeds", []))
    if not (options.rungs or table or options.jobs):
        return make_comparison(values, variants, grid, seeds)
    if options.rungs:
        words = options.rungs.split(",")
        table["rungs"] = [int(word) if word.strip().isdecimal() else word for word in words]
    table.setdefault("rungs", [make_config(values).training.steps])
    if options.jobs:
        table["jobs"] = options.jobs
    return make_measured(values, variants, grid, seeds, table)
