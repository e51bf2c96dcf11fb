"""Checks that model and data fit: first by the files alone, before anything is read, then completely."""

from pathlib import Path

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import (
    AUTO,
    Dataset,
    Tokenizer,
    count_windows,
    load_tokenizer,
    open_data,
    vocabulary_before_reading,
)
from narrowgauge.trainer.data.cache import Progress
from narrowgauge.trainer.distributed import Coordinator
from narrowgauge.trainer.runs.run_directory import RunDirectory
from narrowgauge.trainer.training.config.config import Config


def check_vocabulary(config: Config) -> None:
    """Check the model's vocabulary against that of data and tokenizer, as far as their files record it.

    It reads no text and no tokens, so it runs before processes are started and text is prepared.
    """
    data = config.data
    if (needed := vocabulary_before_reading(data.source, data.tokenizer, data.weights)) is not None:
        _require_vocabulary(config, needed)


def open_checked_data(config: Config, coordinator: Coordinator, progress: Progress) -> Dataset:
    """Open the data, prepared by rank 0, and check that the model and its first weights fit it."""
    d = config.data
    coordinator.progress("preparing the data", patience=1000.0)
    if coordinator.rank > 0:
        coordinator.barrier()
    dataset = open_data(d.source, d.tokenizer, d.weights, progress)
    check_data(config, dataset)
    _check_start(config, dataset.tokenizer)
    if coordinator.rank == 0:
        coordinator.barrier()
    return dataset


def check_data(config: Config, dataset: Dataset) -> None:
    """Check that model and data fit, before the run directory is claimed."""
    _require_vocabulary(config, dataset.tokenizer.vocab_size)
    count_windows(dataset.train, config.data.sequence_length)
    count_windows(dataset.val, config.data.sequence_length, "held-out")


def _require_vocabulary(config: Config, needed: int) -> None:
    vocab_size = config.spec.model.vocab_size
    if needed > vocab_size:
        is_named = config.data.tokenizer != AUTO
        origin = f"tokenizer {config.data.tokenizer!r}" if is_named else f"data source {config.data.source!r}"
        raise UserError(
            f"{origin} has token ids up to {needed - 1}, beyond model.vocab_size = {vocab_size}; "
            f"set --model.vocab_size {needed}, or a smaller tokenizer"
        )


def _check_start(config: Config, tokenizer: Tokenizer) -> None:
    """Check that the tokenizer of the data is that of the run in `model.weights`, if set."""
    weights = config.model.weights
    source = RunDirectory(Path(weights)).tokenizer
    if weights and source.is_file() and load_tokenizer(source).to_json() != tokenizer.to_json():
        raise UserError(
            f"data.tokenizer = {config.data.tokenizer!r} is not the tokenizer that model.weights = "
            f"{weights!r} was trained with, so its ids mean other text; leave data.tokenizer out"
        )
