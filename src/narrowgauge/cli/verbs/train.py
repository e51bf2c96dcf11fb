"""`train`, and `convert`, which writes a run for `train` to continue."""

import argparse
import os
from functools import partial
from pathlib import Path

from rich.console import Console

from narrowgauge.cli.parsing.options import config_values, key_names
from narrowgauge.distributed import world_from
from narrowgauge.errors import UserError
from narrowgauge.laboratory.train import train_config
from narrowgauge.runs import convert_run
from narrowgauge.runs.run_directory import RunDirectory
from narrowgauge.runs.use.convert import left_out
from narrowgauge.training import make_config


def run_train(options: argparse.Namespace) -> None:
    """Train or continue a run; the first rank writes the report and prints the summary."""
    console, names = Console(), key_names()
    allowed = [names.get(key.strip(), key.strip()) for key in options.allow_change.split(",") if key.strip()]
    branch = _branch(options.branch) if options.branch else None
    if branch is not None and options.config is None:
        options.config = branch[0] / "config.toml"
    config = make_config(config_values(options))
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    train_config(config, options.out, console, allowed, options.profile, branch, say, options.watch)


def _branch(text: str) -> tuple[Path, int]:
    """Run directory and step of `--branch RUN@STEP`."""
    run, _, step = text.rpartition("@")
    if not run or not step.isdecimal():
        raise UserError(f"--branch {text}: write RUN@STEP, as in runs/long@256")
    if world_from(os.environ, 0).size > 1:
        raise UserError("--branch makes a run directory in one process; start it once without the launcher")
    return Path(run), int(step)


def run_convert(options: argparse.Namespace) -> None:
    """Write a new run directory with the state converted to another recipe."""
    step = convert_run(options.run, options.recipe, options.out)
    print(f"{options.out}: the state of {options.run} after step {step}, under recipe {options.recipe}")
    if left := left_out(RunDirectory(options.run).config(own_recipe=True)):
        print(f"left out: {', '.join(left)}, set on top of the old recipe; a recipe file keeps them")
    print(f"to continue: narrowgauge train {options.out}/config.toml --out {options.out}")
