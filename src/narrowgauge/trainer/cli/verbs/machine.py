"""`plan` estimates what a run needs, and `scaling` measures whether more processes are faster."""

import math
from pathlib import Path
from typing import Annotated

from narrowgauge.system.errors import UserError
from narrowgauge.system.result import Result
from narrowgauge.trainer import training  # each name is imported when it is used
from narrowgauge.trainer.cli.line import config_values
from narrowgauge.trainer.cluster.plan.cluster_spec import cluster_name, cluster_names
from narrowgauge.trainer.laboratory.arguments import Amount, Console, Count, Form, Line, Say

_CLUSTERS = f"{', '.join(cluster_names())}, or a .toml file"


def plan(
    line: Line,
    *,
    cluster: Annotated[str | None, Form("SPEC", cluster_name), _CLUSTERS] = None,
    devices: Annotated[Count, "number of devices"] = 1,
    tokens: Annotated[Amount | None, "training tokens, as in 300B (default: from the steps)"] = None,
    price: Annotated[str | None, Form("P"), "price of a device-hour, such as 2.50USD (the cluster's)"] = None,
    gap: Annotated[bool, "forecast the recipe's loss gap and compare it with the time saved"] = False,
) -> Result:
    """Estimate a run before it starts: memory by class, traffic, time, cost.

    narrowgauge plan --model llama3-1b --recipe msamp-o2 --memory-limit 24GB
    narrowgauge plan my.toml --cluster h100 --devices 64 --tokens 300B
    """
    from rich.console import Console

    from narrowgauge.trainer.cluster.plan.cluster_spec import load_cluster
    from narrowgauge.trainer.laboratory.plan import plan_config
    from narrowgauge.trainer.training.config.named import with_published

    values = config_values(line)
    values, note = (values, "") if line.config else with_published(values)
    with Console(stderr=True).status("") as status:
        return plan_config(
            training.make_config(values),
            load_cluster(cluster) if cluster else None,
            int(tokens or 0),
            devices,
            price,
            gap,
            line.command_line,
            note,
            status.update,
        )


def scaling(
    line: Line,
    *,
    procs: Annotated[str, Form("N,...", is_list=True), "numbers of processes, ascending"] = "",
    seconds: Annotated[float, Form("N"), "seconds per number and mode"] = 5.0,
    rounds: Annotated[Count, "rounds that share the seconds"] = 3,
    json: Annotated[bool, "print JSON (scaling.json) instead of a table"] = False,
    console: Console,
    say: Say,
) -> None:
    """Train on 1 to N processes: speed-up, efficiency, communication.

    narrowgauge scaling --procs 1,2 --device cpu --seconds 5
    """
    from narrowgauge.trainer.cluster.scaling.scaling import read_sizes
    from narrowgauge.trainer.cluster.scaling.scaling import scaling as measure
    from narrowgauge.trainer.cluster.scaling.table import print_scaling

    if not 0 < seconds < math.inf:
        raise UserError(f"--seconds {seconds:g}: it must be a number above 0, as in --seconds 5")
    sizes, config = read_sizes(procs), training.make_config(config_values(line))
    out = line.out or Path("runs") / f"scaling-{config.model.name}"
    console.quiet = json
    result = measure(config, sizes, seconds, rounds, out, console)
    if json:
        print(result.as_json(), end="")
        return
    print_scaling(result, console)
    say(f"figures: {out / 'scaling.json'}")
