"""`bench`: measures a step."""

from typing import Annotated

from narrowgauge.trainer import training  # each name is imported when it is used
from narrowgauge.trainer.laboratory.arguments import Console, Count, File, Line, Names, config_values


def bench(
    line: Line,
    *,
    rounds: Annotated[Count, "timed steps of each program"] = 5,
    peers: Annotated[Names | None, "programs to compare with; none: time narrowgauge only"] = None,
    json: Annotated[File | None, "write all figures to FILE"] = None,
    console: Console,
) -> None:
    """Time a step; compare it with the machine's ceilings and plain torch.

    narrowgauge bench --model gpt2-debug --recipe fp8 --peers none
    """
    from json import dumps

    from narrowgauge.system.files import write_whole
    from narrowgauge.trainer.bench import bench as measure

    chosen = None if peers is None else [name for name in peers if name != "none"]
    result = measure(training.make_config(config_values(line)), chosen, rounds, console)
    if json:
        write_whole(json, dumps(result.as_json(), indent=2) + "\n")
