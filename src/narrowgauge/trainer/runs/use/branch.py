"""A branch: a run that continues from a checkpoint of another, the trunk, under another schedule or recipe.

The branch takes everything that affects the trajectory: weights, moments, step counts, the position in the
data, the state of the guard. Its configuration is separate from the trunk's. With the schedule "wsd", a
branch of n steps taken where its learning rate begins to fall equals the run of n steps bit for bit, since
until then the rate depends on the warm-up alone. So one long run and a short branch for each token budget
give the end points of many runs (arXiv 2404.06395; 2405.18392).

Under another recipe, weights (or their masters) and moments are read as float32 and written in the new casts,
rounded once; the casts are those of the new recipe at that step. Histories of delayed scales and the scale of
the loss start anew.

The new directory appears whole or not at all; `narrowgauge train` continues in it as after a kill.
"""

from pathlib import Path

import torch

from narrowgauge.quantization import master_or_weight, write_weight
from narrowgauge.system.errors import UserError
from narrowgauge.system.files import staged_directory
from narrowgauge.trainer.checkpoint import DamagedError, load, newest_valid, steps, verify
from narrowgauge.trainer.runs.run_directory import RunDirectory, is_settled, run_id_of
from narrowgauge.trainer.training.config.config import Config, make_config
from narrowgauge.trainer.training.step.trainer import Trainer

OFFLOAD = "offload"  # the only key over a recipe that affects where values are stored, not which


def branch_run(trunk: Path, step: int | None, config: Config, out: Path) -> int:
    """Make the run directory `out`, which continues from a checkpoint of `trunk` under `config`; returns the
    step at which it begins.

    Args:
        trunk: A run directory.
        step: The step of its checkpoint; None for the newest.
        config: The configuration of the branch, with the trunk's model and data.
        out: The new run directory, which must not exist.
    """
    old = RunDirectory(trunk)
    before = old.config(own_recipe=True)
    checkpoint = _checkpoint(old, step)
    if "optimizer" not in load(checkpoint).tensors:
        raise UserError(
            f"{trunk} is an imported model, with weights and no optimizer; start from it with "
            f"narrowgauge train --model.weights {trunk}"
        )
    trainer = _continued(before, config, checkpoint)
    if trainer.step >= config.training.steps:
        raise UserError(
            f"a branch at step {trainer.step} of {trunk} has no step left: training.steps = "
            f"{config.training.steps}; branch earlier, or raise --steps"
        )
    digest, is_same = old.corpus_digest(), before.spec.recipe == config.spec.recipe
    recipes = "" if is_same else f"{before.recipe.name} to {config.recipe.name}, "
    facts = {"event": "branch" if is_same else "convert", "step": trainer.step}
    with staged_directory(out) as folder:
        new = RunDirectory(folder)
        new.claim(config)
        new.tokenizer.write_bytes(old.tokenizer.read_bytes())
        new.keep_special_tokens(old.special_tokens())
        for line in old.lines():
            if is_settled(line, trainer.step):
                new.record(line)
        new.record({**facts, "reason": f"from {recipes}{trunk}", "corpus": digest})
        trainer.plan_save(new.checkpoints, run_id_of(config, digest)).write()
        reason = f"branched from {trunk} after step {trainer.step}; resume it with train"
        new.set_status("preempted", reason)
    return trainer.step


def _checkpoint(run: RunDirectory, step: int | None) -> Path:
    """The whole checkpoint of a step, or the newest."""
    path = newest_valid(run.checkpoints, None)[0] if step is None else run.checkpoints / f"step-{step}"
    try:
        if path is None:
            raise UserError(f"{run.path} has no checkpoint yet, so nothing branches off; continue it first")
        verify(path, None)
    except DamagedError:
        kept = ", ".join(map(str, steps(run.checkpoints))) or "none"
        raise UserError(
            f"{run.path} has no whole checkpoint of step {step} (kept: {kept}); name one of these, or train "
            "it with a --checkpoint.every that divides the step and a larger --checkpoint.keep"
        ) from None
    return path


def _continued(before: Config, after: Config, checkpoint: Path) -> Trainer:
    """A trainer of `after` in the state of a checkpoint of `before`."""
    if before.spec.model != after.spec.model:
        raise UserError(f"{checkpoint} is of another model; a branch has the model and the data of its trunk")
    b = Trainer.begin(after, torch.device("cpu"))
    if before.spec.recipe == after.spec.recipe:
        b.restore(checkpoint)
        return b
    a = Trainer.begin(before, torch.device("cpu"))
    a.restore(checkpoint)
    b.step = a.step
    b.follow_rules()  # by now a rule may keep state in other casts
    sources = dict(a.model.named_parameters())
    with torch.no_grad():
        for name, p in b.model.named_parameters():
            write_weight(p, master_or_weight(sources[name]))
            b.optimizer.state[p]["step"].copy_(a.optimizer.state[sources[name]]["step"])
            moments = a.optimizer.moments(sources[name])
            for place, moment in b.optimizer.moments(p).items():
                if place in moments:
                    moment.write(moments[place].read())
    b.guard = a.guard
    b.guard.raised = []  # by the other recipe
    return b


def with_recipe(config: Config, recipe: str) -> Config:
    """The configuration with another recipe; of the keys set over the old one, only `offload` is kept."""
    tables = config.model_dump()
    kept = {key: value for key, value in config.recipe.places.items() if key == OFFLOAD}
    tables["recipe"] = {"name": recipe, "backend": config.recipe.backend, **kept}
    return make_config(tables)
