"""Opens the subject of a probe and its optimizer: a run, or a model of another program."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from narrowgauge.recipes import Recipe
from narrowgauge.system.errors import checked
from narrowgauge.trainer.analysis.gradient import Position, linear_layers
from narrowgauge.trainer.analysis.probe import Subject
from narrowgauge.trainer.analysis.update import SecondMoment, StepMetric
from narrowgauge.trainer.checkpoint import load, newest_valid
from narrowgauge.trainer.checkpoint.interop.external_model import is_external_model
from narrowgauge.trainer.data import validation_batches
from narrowgauge.trainer.runs import TrainedRun, open_run
from narrowgauge.trainer.runs.run_directory import RunDirectory
from narrowgauge.trainer.runs.use.trained_model import run_data
from narrowgauge.trainer.training.step.trainer import Trainer


@dataclass(frozen=True)
class Probed:
    """A subject, its run or model, and the recipe that it was trained under."""

    subject: Subject
    trained: TrainedRun
    recipe: Recipe

    @property
    def layers(self) -> list[str]:
        """The names of the linear layers, in the order of the model."""
        return linear_layers(self.trained.model)


@checked
def open_probed(
    run: str | Path,
    device: str = "auto",
    tokenizer: str | Path | None = None,
    data: str | Path | None = None,
    batches: int = 8,
    batch_size: int | None = None,
    sequence_length: int | None = None,
) -> Probed:
    """Open a run or a model of another program, with batches of held-out text.

    Args:
        run: A run directory, a Hugging Face folder or an llm.c model file.
        device: "auto", "cpu", "cuda" or "cuda:N".
        tokenizer: A tokenizer file that replaces the model's.
        data: A text other than the run's.
        batches: The number of batches; spread evenly over the held-out text.
        batch_size: Sequences in a batch; None for the run's micro-batch.
        sequence_length: Tokens in a sequence; None for the run's.

    Raises:
        UserError: The path is neither a run nor a model, has no checkpoint, or there is too little text.
    """
    trained = open_run(Path(run), device, None if tokenizer is None else Path(tokenizer))
    own, training = trained.config.data, trained.config.training
    tokens = run_data(trained, None if data is None else str(data), None).val
    size, length = batch_size or training.micro_batch_size, sequence_length or own.sequence_length
    taken = list(validation_batches(tokens, size, length, batches * size, own.separate_documents))
    weights = trained.weights()
    spec = replace(trained.config.spec, recompute=0, z_loss=0.0, balance_loss=0.0)  # the cross entropy alone
    steps = training.steps
    decay = trained.config.decay_start
    position = Position(training.seed, min(trained.step + 1, steps), steps, decay)
    target = next(trained.model.parameters()).device
    return Probed(Subject(spec, weights, position, taken, target), trained, trained.config.spec.recipe)


def step_metric(trained: TrainedRun) -> StepMetric:
    """How a run's optimizer weighs a gradient; by the size of the weights if AdamW left no state."""
    config, weights = trained.config, trained.weights()
    checkpoint = None
    if not is_external_model(trained.path):
        checkpoint, _ = newest_valid(RunDirectory(trained.path).checkpoints, None)
    if checkpoint is None or config.optimizer.name != "adamw" or "optimizer" not in load(checkpoint).tensors:
        return StepMetric(weights)
    trainer = Trainer.begin(config, torch.device("cpu"))
    trainer.restore(checkpoint)
    device = next(trained.model.parameters()).device
    moments = {}
    for name, p in trainer.model.named_parameters():
        v = trainer.optimizer.moments(p)["v"].read().to(device)
        moments[name] = SecondMoment(v, int(trainer.optimizer.state[p]["step"]))
    return StepMetric(weights, moments, config.optimizer.betas[1], config.optimizer.eps)
