"""`plan` estimates what a run needs, and `scaling` measures whether more processes are faster."""

import argparse
import json
import math
from pathlib import Path

from rich.console import Console

from narrowgauge.cli.parsing.options import config_values
from narrowgauge.cluster import (
    load_cluster,
    make_plan,
    measure,
    parse_price,
    print_plan,
    print_scaling,
    read_sizes,
    tokens_of,
)
from narrowgauge.cluster.plan.pays import pays
from narrowgauge.cluster.plan.plan import as_json as plan_as_json
from narrowgauge.cluster.scaling.scaling import scaling
from narrowgauge.errors import UserError
from narrowgauge.training import make_config


def run_plan(options: argparse.Namespace) -> None:
    """Print the plan of a configuration."""
    config = make_config(config_values(options))
    cluster = load_cluster(options.cluster) if options.cluster else None
    if cluster is None and (options.tokens or options.price or options.gap):
        raise UserError("--tokens, --price and --gap need to know the machine; name one with --cluster")
    devices = int(_number("--devices", options.devices, int))
    price = None if options.price is None else parse_price("--price", options.price)
    tokens = tokens_of(options.tokens) if options.tokens else 0
    plan = make_plan(config, devices, cluster)
    decision = pays(plan, devices, cluster, tokens) if cluster is not None and options.gap else None
    if options.json:
        more = {} if decision is None else {"gap": decision.as_json()}
        print(json.dumps(plan_as_json(plan, tokens, price) | more, indent=2))
        return
    print_plan(plan, Console(), tokens, price, options.command_line)
    if decision is not None:
        print(decision.line)


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
    if options.rank_of is not None:
        measure(options.rank_of, options.seconds)
        return
    sizes, config = read_sizes(options.procs), make_config(config_values(options))
    out = options.out or Path("runs") / f"scaling-{config.model.name}"
    console = Console()
    progress = Console(stderr=True, quiet=True) if options.json else console
    result = scaling(config, sizes, options.seconds, out, progress)
    if options.json:
        print(result.as_json(), end="")
        return
    print_scaling(result, console)
    console.print(f"figures: {out / 'scaling.json'}", markup=False, highlight=False, soft_wrap=True)
