"""`scaling` measures whether more processes are faster."""

import math
from pathlib import Path
from typing import Annotated

from narrowgauge.system.errors import UserError
from narrowgauge.trainer import training  # each name is imported when it is used
from narrowgauge.trainer.laboratory.arguments import Console, Count, Form, Line, Say, config_values


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
