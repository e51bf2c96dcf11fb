"""Runs and their steps in this process."""

import pytest
import torch

from narrowgauge.trainer.data import prepare
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.trainer import Trainer
from support.in_process import train, trained, with_trainer

__all__ = ["train", "trained", "with_trainer"]


@pytest.fixture
def begin(tiny):
    """A trainer of the tiny run with changes, and its batches."""

    def do(changes=None):
        config = make_config(tiny(changes))
        trainer = Trainer.begin(config, torch.device("cpu"))
        return trainer, trainer.batches(prepare(config.data.source, config.data.tokenizer).train)

    return do
