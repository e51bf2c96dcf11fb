"""`doctor` checks this machine without torch, which may be broken; `bench` and `scaling` measure it."""

import math
from pathlib import Path
from typing import Annotated

from narrowgauge.system.errors import UserError
from narrowgauge.trainer import training  # each name is imported when it is used
from narrowgauge.trainer.laboratory import arguments as given
from narrowgauge.trainer.laboratory.arguments import Form


def doctor(
    *,
    json: Annotated[bool, "print a JSON list of {item, status, found, fix}"] = False,
    data: Annotated[given.Source | None, "also check this data (as for train --data)"] = None,
    tokenizer: Annotated[str | None, Form("T"), "also check this tokenizer: bytes, bpe-N or a file"] = None,
    console: given.Console,
) -> int:
    """Check this machine and say how to fix what is missing (then exit code 1)."""
    from narrowgauge.trainer.cluster.doctor.doctor import as_json, examine, print_items

    verdicts = examine(data, tokenizer)
    if json:
        print(as_json(verdicts))
    else:
        print_items(verdicts, console)
    return int(any(verdict.status == "MISS" for verdict in verdicts.values()))


def bench(
    line: given.Line,
    *,
    rounds: Annotated[given.Count, "timed steps of each program"] = 5,
    peers: Annotated[given.Names | None, "programs to compare with; none: time narrowgauge only"] = None,
    json: Annotated[given.File | None, "write all figures to FILE"] = None,
    console: given.Console,
) -> None:
    """Time a step; compare it with the machine's ceilings and plain torch.

    narrowgauge bench --model gpt2-debug --recipe fp8 --peers none
    """
    from json import dumps

    from narrowgauge.system.files import write_whole
    from narrowgauge.trainer.bench.bench import bench as measure

    chosen = None if peers is None else [name for name in peers if name != "none"]
    result = measure(training.make_config(given.config_values(line)), chosen, rounds, console)
    if json:
        write_whole(json, dumps(result.as_json(), indent=2) + "\n")


def scaling(
    line: given.Line,
    *,
    procs: Annotated[str, Form("N,...", is_list=True), "numbers of processes, ascending"] = "",
    seconds: Annotated[float, Form("N"), "seconds per number and mode"] = 5.0,
    rounds: Annotated[given.Count, "rounds that share the seconds"] = 3,
    json: Annotated[bool, "print JSON (scaling.json) instead of a table"] = False,
    console: given.Console,
) -> None:
    """Train on 1 to N processes: speed-up, efficiency, communication.

    narrowgauge scaling --procs 1,2 --device cpu --seconds 5
    """
    from narrowgauge.trainer.cluster.scaling.scaling import as_json, print_scaling, read_sizes
    from narrowgauge.trainer.cluster.scaling.scaling import scaling as measure

    if not 0 < seconds < math.inf:
        raise UserError(f"--seconds {seconds:g}: it must be a number above 0, as in --seconds 5")
    sizes, config = read_sizes(procs), training.make_config(given.config_values(line))
    out = line.out or Path("runs") / f"scaling-{config.model.name}"
    console.quiet = json
    result = measure(config, sizes, seconds, rounds, out, console)
    if json:
        print(as_json(result), end="")
        return
    print_scaling(result, console)
    print(f"figures: {out / 'scaling.json'}")
