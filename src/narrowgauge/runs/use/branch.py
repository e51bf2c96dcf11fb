"""A branch: a run that continues from a checkpoint of another, the trunk, with a separate schedule.

The branch takes everything that affects the trajectory: weights, moments, step counts, the position in the
data, the state of the guard. Its configuration is separate from the trunk's. With the schedule "wsd", a
branch of n steps taken where its learning rate begins to fall equals the run of n steps bit for bit, since
until then the rate depends on the warm-up alone. So one long run and a short branch for each token budget
give the end points of many runs (arXiv 2404.06395; 2405.18392).

The new directory appears whole or not at all; `narrowgauge train` continues in it as after a kill.
"""

from pathlib import Path

import torch

from narrowgauge.checkpoint import DamagedError, steps, verify
from narrowgauge.errors import UserError
from narrowgauge.files import staged_directory
from narrowgauge.runs.run_directory import RunDirectory, is_settled, run_id_of
from narrowgauge.training.config.config import Config
from narrowgauge.training.step.trainer import Trainer


def branch_run(trunk: Path, step: int, config: Config, out: Path) -> None:
    """Make the run directory `out`, which continues from a checkpoint of `trunk` under `config`.

    Args:
        trunk: A run directory.
        step: The step of its checkpoint.
        config: The configuration of the branch, with the trunk's model, data and state of the recipe.
        out: The new run directory, which must not exist.

    Raises:
        UserError: `trunk` is not a run, has no such checkpoint, holds another model or state, the branch ends
            before it begins, or `out` is in use.
    """
    old = RunDirectory(trunk)
    old.config()
    if step >= config.training.steps:
        raise UserError(
            f"a branch at step {step} of {trunk} has no step left: training.steps = {config.training.steps}; "
            "branch earlier, or raise --steps"
        )
    checkpoint = old.checkpoints / f"step-{step}"
    try:
        verify(checkpoint, None)
    except DamagedError:
        kept = ", ".join(map(str, steps(old.checkpoints))) or "none"
        raise UserError(
            f"{trunk} has no whole checkpoint of step {step} (kept: {kept}); name one of these, or train it "
            "with a --checkpoint.every that divides the step and a larger --checkpoint.keep"
        ) from None
    digest = old.corpus_digest()
    trainer = Trainer.begin(config.plan, torch.device("cpu"))
    trainer.restore(checkpoint)
    with staged_directory(out) as folder:
        new = RunDirectory(folder)
        new.claim(config)
        new.tokenizer.write_bytes(old.tokenizer.read_bytes())
        new.keep_special_tokens(old.special_tokens())
        for line in old.lines():
            if is_settled(line, step):
                new.record(line)
        new.record({"event": "branch", "step": step, "reason": f"from {trunk}", "corpus": digest})
        trainer.save(new.checkpoints, run_id_of(config, digest))
        new.set_status("preempted", f"branched from {trunk} after step {step}; resume it with train")
