"""The parts of a configuration that determine the steps of a run, as plain records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from narrowgauge.distributed import ModelSpec
from narrowgauge.guard.raises import Raise
from narrowgauge.guard.rules import GuardRules
from narrowgauge.optim import decay_start, learning_rate
from narrowgauge.optim.schedule import ScheduleKind


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan:
    """The keys of `[optimizer]`."""

    name: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float
    momentum: float
    groups: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """The keys of `[schedule]`."""

    kind: ScheduleKind
    warmup_steps: int
    final_lr_fraction: float
    decay_fraction: float


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The input of a `Trainer`.

    Attributes:
        spec: Model, recipe, seed and batch size.
        steps: Optimizer steps of the run.
        micro_batch_size: Sequences that a process computes at once.
        sequence_length: Tokens in a sequence.
        separate_documents: Whether attention is masked between documents in one sequence.
        compiles: Whether the model runs through torch.compile.
        graph: Whether micro-batches are recorded as CUDA graphs (`step.graph_choice`).
        keep: The number of valid checkpoints to keep.
        guard: The rules of the guard.
        optimizer: The optimizer.
        schedule: The learning rate over time.
    """

    spec: ModelSpec
    steps: int
    micro_batch_size: int
    sequence_length: int
    separate_documents: bool
    compiles: bool
    graph: bool | Literal["auto"]
    keep: int
    guard: GuardRules
    optimizer: OptimizerPlan
    schedule: SchedulePlan

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.spec.batch_size * self.sequence_length

    def learning_rate(self, step: int) -> float:
        """The learning rate of an optimizer step, counted from 1."""
        return learning_rate(step, lr=self.optimizer.lr, steps=self.steps, **vars(self.schedule))

    @property
    def decay_start(self) -> int | None:
        """The first step whose learning rate is below the peak; None if there is none."""
        s = self.schedule
        return decay_start(
            steps=self.steps, kind=s.kind, warmup_steps=s.warmup_steps, decay_fraction=s.decay_fraction
        )

    @property
    def warning(self) -> str:
        """A sentence where the learning rate never reaches its peak; "" where it does."""
        warmup = self.schedule.warmup_steps
        words = (
            f"the warm-up of {warmup} steps is longer than the run of {self.steps}: the rate stays below lr"
        )
        return f"{words}; set --schedule.warmup_steps" if warmup > self.steps else ""

    def in_force(self, raises: Sequence[Raise], step: int) -> "TrainingPlan":
        """The plan with the recipe in effect after `step` steps."""
        recipe = self.spec.recipe.with_rules([r.rule(self.spec.recipe) for r in raises])
        at_rest = recipe.at_rest(step + 1, self.steps, self.decay_start)
        return replace(self, spec=replace(self.spec, recipe=at_rest))
