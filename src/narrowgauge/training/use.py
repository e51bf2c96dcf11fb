"""A finished or stopped run, put to use: its newest model, its tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from narrowgauge.data import Tokenizer, load_tokenizer
from narrowgauge.errors import UserError
from narrowgauge.models import Transformer
from narrowgauge.training.config import Config
from narrowgauge.training.directory import RunDirectory
from narrowgauge.training.machine import choose_device
from narrowgauge.training.session import build_model, load_model, newest_checkpoint


@dataclass(frozen=True)
class TrainedRun:
    """What a run left: its configuration, the model of its newest checkpoint, its tokenizer."""

    config: Config
    model: Transformer
    tokenizer: Tokenizer
    step: int


def open_run(path: Path, device: str = "auto") -> TrainedRun:
    """Open a run directory for sampling or evaluation.

    Raises:
        UserError: no run directory, or one without a checkpoint.
    """
    directory = RunDirectory(path)
    config = directory.config(own_recipe=True)
    checkpoint, _ = newest_checkpoint(directory.checkpoints, None)
    if checkpoint is None:
        raise UserError(
            f"{path} has no checkpoint yet: the first is saved after checkpoint.every = "
            f"{config.checkpoint.every} steps; continue the run first"
        )
    model = build_model(config, choose_device(device))
    load_model(model, config, checkpoint)
    return TrainedRun(config, model.eval(), load_tokenizer(directory.tokenizer), checkpoint.step)
