"""`train`, which also continues a branch of another run."""

import os
from pathlib import Path
from typing import Annotated

from narrowgauge.system.errors import UserError
from narrowgauge.trainer import training  # each name is imported when it is used
from narrowgauge.trainer.cli.line import config_values, key_names
from narrowgauge.trainer.laboratory.arguments import Console, Count, Form, Line, Names, Say
from narrowgauge.trainer.runs.choices import PROFILED


def train(
    line: Line,
    *,
    allow_change: Annotated[Names, Form("KEY,..."), "allow these keys to differ from the run in --out"] = (),
    profile: Annotated[
        Count,
        Form("STEPS", alone=PROFILED),
        f"profile STEPS steps ({PROFILED}) into DIR/profile, for Perfetto",
    ] = 0,
    branch: Annotated[str | None, Form("RUN[@STEP]"), "begin at a checkpoint of RUN (the newest)"] = None,
    watch: Annotated[bool, "show a live page meanwhile (narrowgauge watch)"] = False,
    console: Console,
    say: Say,
) -> None:
    """Train a model, or continue a run that stopped.

    narrowgauge train my.toml --steps 2000 --lr 1e-3 --out runs/mine
    narrowgauge train --model gpt2-124m --data my-texts/ --recipe nvfp4 --seq-len 1024
    narrowgauge train --recipe mxfp4 --recipe.fprop.x '{cast = "fp4-row", outliers = 0.99}'
    torchrun --standalone --nproc-per-node 2 -m narrowgauge train --parallel.tensor 2
    """
    from narrowgauge.trainer.laboratory.train import train_config
    from narrowgauge.trainer.runs.use.branch import OFFLOAD

    names = key_names()
    allowed = [names.get(key, key) for key in allow_change]
    begin = _branch(branch) if branch else None
    is_trunks = begin is not None and line.config is None
    if begin is not None and is_trunks:
        line.config = begin[0] / "config.toml"
    values = config_values(line)
    given = {key.removeprefix("recipe.") for key in vars(line) if vars(line)[key] is not None}
    if is_trunks and "name" in given:  # keys that were set over the trunk's recipe
        left = [key for key in values["recipe"] if key not in {*given, "backend", OFFLOAD}]
        for key in left:
            del values["recipe"][key]
        if left:
            say(f"left out: recipe.{', recipe.'.join(left)}, set over the trunk's recipe")
    train_config(training.make_config(values), line.out, console, allowed, profile, begin, say, watch)


def _branch(text: str) -> tuple[Path, int | None]:
    """Run directory and step of `--branch RUN[@STEP]`; None for its newest checkpoint."""
    from narrowgauge.trainer.distributed import world_from

    run, _, step = text.rpartition("@")
    if world_from(os.environ, 0).size > 1:
        raise UserError("--branch makes a run directory in one process; start it once without the launcher")
    if Path(text).is_dir() or not run:
        return Path(text), None
    if not step.isdecimal():
        raise UserError(f"--branch {text}: write RUN or RUN@STEP, as in runs/long@256")
    return Path(run), int(step)
