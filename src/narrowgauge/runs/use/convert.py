"""Converts the newest state of a run to another recipe: a new run directory that continues the run.

Weights (or their masters) and moments are read as float32 and written in the new casts, rounded once; the
casts come from the new recipe at that step. Step counts, the position in the data and the step of the
random streams are copied; histories of delayed scales start empty. Keys that a configuration sets over the
old recipe are dropped, except `offload`. The new directory is created atomically.
"""

from pathlib import Path

import torch

from narrowgauge.checkpoint import load, newest_valid
from narrowgauge.errors import UserError
from narrowgauge.files import staged_directory
from narrowgauge.quantization import master_or_weight, write_weight
from narrowgauge.runs.run_directory import RunDirectory, is_settled, run_id_of
from narrowgauge.training.config.config import Config, make_config
from narrowgauge.training.step.trainer import Trainer

OFFLOAD = "offload"  # the only key over a recipe that affects where values are stored, not which


def convert_run(source: Path, recipe: str, out: Path) -> int:
    """Make the run directory `out` from the newest checkpoint of `source`, under another recipe.

    Args:
        source: a run directory.
        recipe: the name of the new recipe.
        out: the new run directory, which must not exist.

    Returns:
        The step at which the new run continues.

    Raises:
        UserError: `source` is not a run, has no checkpoint or is an imported model, the recipe is unknown, or
            `out` is in use.
    """
    old = RunDirectory(source)
    before = old.config(own_recipe=True)
    after = with_recipe(before, recipe)
    path, _ = newest_valid(old.checkpoints, None)
    if path is None:
        raise UserError(
            f"{source} has no checkpoint yet, so there is nothing to convert; continue the run first"
        )
    if "optimizer" not in load(path).tensors:
        raise UserError(
            f"{source} is an imported model, with weights and no optimizer; start from it with "
            f"narrowgauge train --model.weights {source}"
        )
    digest = old.corpus_digest()
    a, b = (Trainer.begin(config.plan, torch.device("cpu")) for config in (before, after))
    a.restore(path)
    b.step = a.step
    b.follow_rules()  # by now a rule may keep state in other casts
    _copy(a, b)
    with staged_directory(out) as folder:
        new = RunDirectory(folder)
        new.claim(after)
        new.tokenizer.write_bytes(old.tokenizer.read_bytes())
        new.keep_special_tokens(old.special_tokens())
        for line in old.lines():
            if is_settled(line, b.step):
                new.record(line)
        reason = f"from {before.recipe.name} to {recipe}, {source}"
        new.record({"event": "convert", "step": b.step, "reason": reason, "corpus": digest})
        b.save(new.checkpoints, run_id_of(after, digest))
        new.set_status("preempted", f"converted from {source} after step {b.step}; resume it with train")
    return b.step


def with_recipe(config: Config, recipe: str) -> Config:
    """The configuration with another recipe; of the keys set over the old one, only `offload` is kept."""
    tables = config.model_dump()
    kept = {key: value for key, value in config.recipe.places.items() if key == OFFLOAD}
    tables["recipe"] = {"name": recipe, "backend": config.recipe.backend, **kept}
    return make_config(tables)


def left_out(config: Config) -> list[str]:
    """The keys set over a configuration's recipe that `with_recipe` drops."""
    return [f"recipe.{key}" for key in config.recipe.places if key != OFFLOAD]


@torch.no_grad()
def _copy(a: Trainer, b: Trainer) -> None:
    """Copy the state of `a` into `b`."""
    sources = dict(a.model.named_parameters())
    for name, p in b.model.named_parameters():
        write_weight(p, master_or_weight(sources[name]))
        b.optimizer.state[p]["step"].copy_(a.optimizer.state[sources[name]]["step"])
        moments = a.optimizer.moments(sources[name])
        for place, moment in b.optimizer.moments(p).items():
            if place in moments:
                moment.write(moments[place].read())
    b.guard = a.guard
    b.guard.raised = []  # by the other recipe
