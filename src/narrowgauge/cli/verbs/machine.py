"""`plan` estimates what a run needs, and `scaling` measures whether more processes are faster."""

import argparse
import json
import math
from pathlib import Path

from rich.console import Console

from narrowgauge.cli.parsing.options import config_values
from narrowgauge.cluster import load_cluster, measure, print_scaling, read_sizes, tokens_of
from narrowgauge.cluster.scaling.scaling import scaling
from narrowgauge.errors import UserError
from narrowgauge.laboratory.plan import plan_config
from narrowgauge.training import make_config
from narrowgauge.training.config.named import with_published


def run_plan(options: argparse.Namespace) -> None:
    """Print the plan of a configuration."""
    values = config_values(options)
    values, note = (values, "") if options.config else with_published(values)
    with Console(stderr=True).status("") as status:
        found = plan_config(
            make_config(values),
            load_cluster(options.cluster) if options.cluster else None,
            tokens_of(options.tokens) if options.tokens else 0,
            int(_number("--devices", options.devices, int)),
            options.price,
            options.gap,
            options.command_line,
            note,
            status.update,
        )
    if options.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        found.show(Console())


def _number(option: str, text: str, kind: type[int] | type[float]) -> float:
    try:
        number = kind(text)
    except ValueError:
        number = -1
    if not 0 < number < 2**24 or not math.isfinite(number):
        raise UserError(f"{option} {text!r}: it must be a number above 0")
    return number


def run_scaling(options: argparse.Namespace) -> None:
    """Measure and print; a process started by `scaling` measures its steps."""
    if not 0 < options.seconds < math.inf:
        raise UserError(f"--seconds {options.seconds:g}: it must be a number above 0, as in --seconds 5")
    if options.rounds < 1:
        raise UserError(f"--rounds {options.rounds}: it must be at least 1; an interval takes 2, better 3")
    if options.rank_of is not None:
        measure(options.rank_of, options.seconds)
        return
    sizes, config = read_sizes(options.procs), make_config(config_values(options))
    out = options.out or Path("runs") / f"scaling-{config.model.name}"
    console = Console()
    progress = Console(stderr=True, quiet=True) if options.json else console
    result = scaling(config, sizes, options.seconds, options.rounds, out, progress)
    if options.json:
        print(result.as_json(), end="")
        return
    print_scaling(result, console)
    console.print(f"figures: {out / 'scaling.json'}", markup=False, highlight=False, soft_wrap=True)
