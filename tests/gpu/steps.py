"""Short trainings of small models."""

from contextlib import contextmanager

import torch

from narrowgauge.trainer.bench.worker import random_batches
from narrowgauge.trainer.runs.monitor.machine import use_device
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.trainer import Trainer

SIZES = {"dim": 256, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 768, "vocab_size": 1024}
#: Where kernels are interpreted.
TINY = {"dim": 64, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 128, "vocab_size": 256}


def config_of(recipe, is_tiny, backend="auto", length=128, sizes=SIZES, **training):
    """A small model and four steps of two micro-batches; smaller still if `is_tiny`."""
    steps, length, micro = (3, 8, 1) if is_tiny else (4, length, 2)
    training = {"steps": steps, "batch_size": 2 * micro, "micro_batch_size": micro, "seed": 1} | training
    return make_config(
        {
            "model": {"name": "debug"} | (TINY if is_tiny else sizes),
            "data": {"sequence_length": length},
            "training": {"device": "cpu"} | training,
            "optimizer": {"lr": 1e-3},
            "schedule": {"warmup_steps": 2},
            "recipe": {"name": recipe, "backend": backend},
        }
    )


def trained(config, device):
    """The trainer after all steps on the same sequences, and the loss and norm of each step."""
    trainer, batches = Trainer.begin(config, device), random_batches(config, device)
    return trainer, [trainer.train_step(iter(batches))[:2] for _ in range(config.training.steps)]


def weights_and_losses(config, device):
    """What has to repeat bit for bit."""
    trainer, found = trained(config, device)
    weights = {name: p.detach().cpu() for name, p in trainer.model.named_parameters()}
    return weights | {"losses and norms": torch.tensor(found, dtype=torch.float64)}


@contextmanager
def strictly(device):
    """Switch `training.deterministic` on, inside the `with` block."""
    use_device(device, deterministic=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
