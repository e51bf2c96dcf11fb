"""`train`, and `convert`, which writes a run for `train` to continue."""

import argparse
import os
from pathlib import Path

from rich.console import Console

from narrowgauge.cli.parsing.options import config_values, key_names
from narrowgauge.distributed import world_from
from narrowgauge.errors import UserError
from narrowgauge.report import print_comparison, read_run, write_report
from narrowgauge.runs import branch_run, convert_run, default_out, run
from narrowgauge.runs.run_directory import RunDirectory
from narrowgauge.runs.use.convert import left_out
from narrowgauge.signals import is_compared
from narrowgauge.training import Diverged, make_config


def run_train(options: argparse.Namespace) -> None:
    """Train or continue a run; the first rank writes the report and prints the summary."""
    console = Console()
    names = key_names()
    allowed = [names.get(key.strip(), key.strip()) for key in options.allow_change.split(",") if key.strip()]
    trunk, at = _trunk(options.branch) if options.branch else (None, 0)
    if trunk is not None and options.config is None:
        options.config = trunk / "config.toml"
    config = make_config(config_values(options))
    if trunk is not None:
        options.out = options.out or default_out(config, allowed)
        if not (options.out / "config.toml").exists():
            branch_run(trunk, at, config, options.out)
    is_first = not world_from(os.environ, 0).rank  # rank 0 reports for all
    try:
        path = run(config, options.out, console, allowed, options.profile)
    except Diverged:  # also a result: the page shows how it happened
        if is_first:
            _report(options.out or default_out(config, allowed), console)
        raise
    if is_first:
        if not is_compared():
            print_comparison([read_run(path)], console)
        _report(path, console)


def _trunk(text: str) -> tuple[Path, int]:
    """Run directory and step of `--branch RUN@STEP`."""
    run, _, step = text.rpartition("@")
    if not run or not step.isdecimal():
        raise UserError(f"--branch {text}: write RUN@STEP, as in runs/long@256")
    if world_from(os.environ, 0).size > 1:
        raise UserError("--branch makes a run directory in one process; start it once without the launcher")
    return Path(run), int(step)


def _report(path: Path, console: Console) -> None:
    """Write the page of a run and print its path, unless `compare` shows the run."""
    report = write_report([path], path / "report.html")
    if not is_compared():
        console.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)


def run_convert(options: argparse.Namespace) -> None:
    """Write a new run directory with the state converted to another recipe."""
    step = convert_run(options.run, options.recipe, options.out)
    print(f"{options.out}: the state of {options.run} after step {step}, under recipe {options.recipe}")
    if left := left_out(RunDirectory(options.run).config(own_recipe=True)):
        print(f"left out: {', '.join(left)}, set on top of the old recipe; a recipe file keeps them")
    print(f"to continue: narrowgauge train {options.out}/config.toml --out {options.out}")
