"""The subject of a probe from a path: a run, or a model of another program."""

from dataclasses import dataclass, replace
from pathlib import Path

from narrowgauge.analysis.gradient import Position
from narrowgauge.analysis.probe import Subject
from narrowgauge.data import validation_batches
from narrowgauge.data.cache import Progress
from narrowgauge.errors import UserError
from narrowgauge.recipes import Recipe
from narrowgauge.training import TrainedRun, open_run
from narrowgauge.training.use.run_data import run_data


@dataclass(frozen=True)
class Probed:
    """A subject, the run or model it is of, and the recipe that it was trained under."""

    subject: Subject
    trained: TrainedRun
    recipe: Recipe


def open_probed(
    path: Path,
    device: str = "auto",
    tokenizer: Path | None = None,
    source: str | None = None,
    batches: int = 8,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    progress: Progress | None = None,
) -> Probed:
    """Open a run or a model of another program, with batches of held-out text.

    Args:
        path: A run directory, a Hugging Face folder or an llm.c model file.
        device: "auto", "cpu", "cuda" or "cuda:N".
        tokenizer: A tokenizer file that replaces the model's.
        source: Other text than the run's.
        batches: The number of batches; spread evenly over the held-out text.
        batch_size: Sequences of a batch; None: the run's micro-batch.
        sequence_length: Tokens of a sequence; None: the run's.
        progress: Shows how text is prepared.

    Raises:
        UserError: There is no such run or model, it has no checkpoint, or there is too little text for two
            batches.
    """
    trained = open_run(path, device, tokenizer)
    data, training = trained.config.data, trained.config.training
    tokens = run_data(trained, source, progress).val
    size, length = batch_size or training.micro_batch_size, sequence_length or data.sequence_length
    taken = list(validation_batches(tokens, size, length, batches, data.separate_documents))
    if len(taken) < 2:
        raise UserError(
            f"the probe has {len(taken)} batch of {size} sequences of {length} tokens, and an interval needs "
            "two; set --batches to 2 or more, take a smaller --batch-size, or bring more text with --data"
        )
    weights = trained.weights()
    spec = replace(trained.config.spec, recompute=0)
    steps = training.steps
    position = Position(training.seed, min(trained.step + 1, steps), steps)
    target = next(trained.model.parameters()).device
    return Probed(Subject(spec, weights, position, taken, target), trained, trained.config.spec.recipe)
