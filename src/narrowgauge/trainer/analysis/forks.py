"""The cost of a change of the recipe, measured by training: a few steps with it and a few without.

A fork continues a run from its newest checkpoint, at step s, as a run of s + n steps would: the same weights,
moments and schedule, with a rate that falls towards the last step. All forks of a seed process the same text
in the same order, and end with a loss on the same held-out batches. So they differ in the change alone:

    gap = loss of the fork with the change - loss of the fork without it, nats a token

The seed of a fork orders its text and draws its random bits, so seeds are repeats. Each fork's loss
comes from its own forward pass. In the fork without a change, all GEMMs of linear layers are in `compute`;
state, attention and the residual stream are the run's in all forks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes import GEMM_PLACES, Recipe, Rule
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.analysis.gradient import Position, Progress, counted, loss_of
from narrowgauge.trainer.analysis.probe_run import Probed
from narrowgauge.trainer.checkpoint import newest_valid
from narrowgauge.trainer.checkpoint.interop.external_model import is_external_model
from narrowgauge.trainer.runs.run_directory import RunDirectory
from narrowgauge.trainer.runs.use.trained_model import run_data
from narrowgauge.trainer.training.step.trainer import Trainer

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Forks:
    """How forks are made.

    Attributes:
        steps: The optimizer steps of each.
        seeds: The repeats, each with another order of the text.
    """

    steps: int
    seeds: int = 3

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("seeds", self.seeds)):
            if value < 1:
                raise UserError(f"forks need {name} of 1 or more, not {value}")

    def gaps(
        self, probed: Probed, changes: Mapping[Key, Recipe], show: Progress | None = None
    ) -> dict[Key, dict[int, float]]:
        """The gap of each change by seed, in nats a token.

        Args:
            probed: The run, and the held-out batches of the losses.
            changes: Recipes by the caller's keys, from `wide` or `alone`.
            show: Called with "forks", those done and their number.

        Raises:
            UserError: It is a model of another program, which has no checkpoint to continue from.
        """
        base = wide(probed.trained.config.spec.recipe)
        gaps: dict[Key, dict[int, float]] = {key: {} for key in changes}
        forks = [(seed, recipe) for seed in range(1, self.seeds + 1) for recipe in (base, *changes.values())]
        losses = (self.loss(probed, recipe, seed) for seed, recipe in counted("forks", forks, show))
        for seed in range(1, self.seeds + 1):
            without = next(losses)
            for key in changes:
                gaps[key][seed] = next(losses) - without
        return gaps

    def loss(self, probed: Probed, recipe: Recipe, seed: int) -> float:
        """The loss at the end of one fork, in nats a token; its text has the run's seed + `seed`."""
        trained, subject = probed.trained, probed.subject
        checkpoint = None
        if not is_external_model(trained.path):
            checkpoint, _ = newest_valid(RunDirectory(trained.path).checkpoints, None)
        if checkpoint is None:
            raise UserError(f"{trained.path} has no checkpoint to continue from; forks need a run directory")
        steps, seed = trained.step + self.steps, trained.config.training.seed + seed
        fork = trained.config.with_training(steps=steps, seed=seed).with_recipe(recipe)
        trainer = Trainer.begin(fork, subject.device)
        trainer.restore(checkpoint)
        with trainer.batches(run_data(trained, None, None).train) as batches:
            while trainer.step < steps:
                trainer.train_step(batches)
        position = Position(seed, steps, steps, fork.decay_start)
        model = trainer.model.eval()
        losses = [loss_of(model, batch, position) * batch.targets for batch in subject.batches]
        return math.fsum(losses) / sum(batch.targets for batch in subject.batches)


def wide(recipe: Recipe) -> Recipe:
    """A recipe with all GEMMs of linear layers in `compute`, at any time."""
    casts = dict.fromkeys(GEMM_PLACES, make_cast(recipe.compute))
    return recipe.with_rules((Rule(places=casts),))


def only_in(recipe: Recipe, layer: str, casts: Mapping[str, Cast]) -> Recipe:
    """A recipe like `wide`, except for some places of one layer."""
    changed = wide(recipe).with_rules((Rule(places=casts, modules=(layer,)),))
    return replace(changed, name=f"{layer}: {', '.join(casts)}")
