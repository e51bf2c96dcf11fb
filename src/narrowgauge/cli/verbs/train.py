"""`train`, which also continues a branch of another run."""

import argparse
import os
from functools import partial
from pathlib import Path

from rich.console import Console

from narrowgauge.cli.parsing.options import config_values, key_names
from narrowgauge.distributed import world_from
from narrowgauge.errors import UserError
from narrowgauge.laboratory.train import train_config
from narrowgauge.runs.use.branch import OFFLOAD
from narrowgauge.training import make_config


def run_train(options: argparse.Namespace) -> None:
    """Train or continue a run; the first rank writes the report and prints the summary."""
    console, names = Console(), key_names()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    allowed = [names.get(key.strip(), key.strip()) for key in options.allow_change.split(",") if key.strip()]
    branch = _branch(options.branch) if options.branch else None
    is_trunks = branch is not None and options.config is None
    if branch is not None and is_trunks:
        options.config = branch[0] / "config.toml"
    values = config_values(options)
    given = {key.removeprefix("recipe.") for key in vars(options) if vars(options)[key] is not None}
    if is_trunks and "name" in given:  # keys that were set over the trunk's recipe
        left = [key for key in values["recipe"] if key not in {*given, "backend", OFFLOAD}]
        for key in left:
            del values["recipe"][key]
        if left:
            say(f"left out: recipe.{', recipe.'.join(left)}, set over the trunk's recipe")
    config = make_config(values)
    train_config(config, options.out, console, allowed, options.profile, branch, say, options.watch)


def _branch(text: str) -> tuple[Path, int | None]:
    """Run directory and step of `--branch RUN[@STEP]`; None for its newest checkpoint."""
    run, _, step = text.rpartition("@")
    if world_from(os.environ, 0).size > 1:
        raise UserError("--branch makes a run directory in one process; start it once without the launcher")
    if Path(text).is_dir() or not run:
        return Path(text), None
    if not step.isdecimal():
        raise UserError(f"--branch {text}: write RUN or RUN@STEP, as in runs/long@256")
    return Path(run), int(step)
