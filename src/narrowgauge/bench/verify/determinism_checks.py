"""Determinism: runs the same passes twice under `training.deterministic` and compares every bit.

On a GPU, the backward pass of attention adds its parts in the order in which thread blocks finish, unless
torch uses a deterministic kernel. Replays (`guard.replay_every`) and bitwise resumption need determinism.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from narrowgauge.bench.verify.check import Check, Tensors, same
from narrowgauge.bench.verify.loss_checks import small_config
from narrowgauge.bench.verify.operations import Shape, attention
from narrowgauge.bench.worker import random_batches
from narrowgauge.runs.monitor.hardware import use_device
from narrowgauge.training.step.trainer import Trainer

RECIPES = ("bf16", "fp8", "nvfp4")
DO = "do not set guard.replay_every, and expect a resumed run to differ in the last bits; please report it"
_SMALL: Shape = (2, 4, 40, 16)
_REAL: tuple[Shape, ...] = ((2, 12, 1024, 128), (4, 16, 2048, 64))


def determinism_checks(device: torch.device) -> list[Check]:
    """The checks: attention, and a small model under some recipes."""
    shapes = (_SMALL, *_REAL) if device.type == "cuda" else (_SMALL,)
    twice: dict[str, list[Callable[[torch.device], Tensors]]] = {
        "attention": [partial(attention, shape=shape) for shape in shapes]
    }
    twice |= {f"a model under {name}": [partial(_weights, name)] for name in RECIPES}
    return [Check("determinism", name, partial(_twice, runs), DO) for name, runs in twice.items()]


def _twice(runs: list[Callable[[torch.device], Tensors]], device: torch.device) -> str:
    with strictly(device):
        for run in runs:
            words = same(run(device), run(device))
    return f"twice, {words}"


@contextmanager
def strictly(device: torch.device) -> Iterator[None]:
    """Switch `training.deterministic` on, inside the `with` block."""
    use_device(device, deterministic=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _weights(recipe: str, device: torch.device) -> Tensors:
    """The weights of a small model after two steps."""
    config = small_config(recipe, "auto", device.type == "cpu")
    trainer, batches = Trainer.begin(config.plan, device), random_batches(config, device)
    for _ in range(2):
        trainer.train_step(iter(batches))
    return {name: p.detach() for name, p in trainer.model.named_parameters()}
