"""`compare`: trains recipes, variants, a grid and seeds, and reports verdicts and a page."""

import argparse
from pathlib import Path

from rich.console import Console

from narrowgauge.cli.parsing.options import config_values, key_names
from narrowgauge.experiment.design import Experiment
from narrowgauge.experiment.gate import parse_gate
from narrowgauge.experiment.grid import parse_variant, recipe_variants
from narrowgauge.laboratory.compare import experiment_of, plan_comparison, run_comparison


def run(options: argparse.Namespace) -> int:
    """Train each unfinished run; print the verdicts and write the page.

    Returns:
        The exit code: 1 if a run failed, or if there is a gate and a variant does not pass it.
    """
    gate = parse_gate(options.gate) if options.gate is not None else None
    experiment, console = read_plan(options), Console()
    kind = "ladder" if experiment.is_measured else "compare"
    out = options.out or Path("runs") / f"{kind}-{experiment.runs[0].config.model.name}"
    if options.dry_run:
        plan_comparison(experiment, out, console)
        return 0
    found = run_comparison(experiment, out, console, gate, options.expected, is_watched=options.watch)
    return int(found.has_failed)


def read_plan(options: argparse.Namespace) -> Experiment:
    """The experiment that the options and the file specify.

    Raises:
        UserError: something in them is wrong.
    """
    names = key_names()
    words = options.rungs.split(",") if options.rungs else []
    return experiment_of(
        config_values(options),
        recipe_variants(options.recipes),
        [parse_variant(text, names) for text in options.variant],
        options.seeds,
        options.arms,
        [int(word) if word.strip().isdecimal() else word for word in words],
        options.jobs or 0,
    )
