"""Short trainings under each kind of recipe: compares losses on this device with the CPU's plain path.

A small model memorizes a few sequences, using every part of a training step: kernels, native GEMMs,
low-precision state and the update. The two sequences of losses are close but not equal, because sums are
ordered differently and the difference grows with each step; so there are few steps. Each loss may differ by
the share `ALLOWED`; over three steps with interpreted kernels the largest difference was 0.0002. If losses
differ by more, the same training is repeated without kernels, then emulated, and the advice names the setting
that agrees.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from narrowgauge.bench.verify.check import Check, Disagreement
from narrowgauge.bench.worker import random_batches
from narrowgauge.kernels.dispatch import plain_operations
from narrowgauge.nn.self_test import verified_backend
from narrowgauge.training import Config, make_config
from narrowgauge.training.step.trainer import Trainer

KINDS = (
    *("fp32", "bf16", "fp16", "fp8", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "mxfp6-e2m3", "mxfp4"),
    *("nvfp4", "fp4", "quartet", "msamp-o1", "msamp-o2", "msamp-o3", "bf16-sr", "coat", "eco"),
)
INTERPRETED = ("bf16", "fp8", "nvfp4", "msamp-o2")
ALLOWED = 0.01
UNKNOWN = "this recipe is computed wrongly here: use another one, and please report it with this file"


def loss_checks(device: torch.device, lacks: str) -> list[Check]:
    """The checks of short trainings; `lacks` is why this machine cannot run them."""
    names = INTERPRETED if device.type == "cpu" else KINDS
    return [Check("losses", name, partial(_losses_agree, name), UNKNOWN, lacks) for name in names]


def _losses_agree(name: str, device: torch.device) -> str:
    is_small = device.type == "cpu"
    config = small_config(name, "auto", is_small)
    with plain_operations():
        expected = trained(small_config(name, "emulated", is_small), torch.device("cpu"))
    found = trained(config, device)
    backend = verified_backend(config.spec.recipe, device).name
    if (off := _distance(found, expected)) <= ALLOWED:
        return (
            f"{backend}: {len(found)} steps from {found[0]:.3f} to {found[-1]:.3f}, off by at most "
            f"{off:.1g} of the loss, {ALLOWED:g} is allowed"
        )
    remedy = _remedy(name, device, expected)
    raise Disagreement(f"{backend}: the loss is off by {off:.2g}, {ALLOWED:g} is allowed; {remedy}")


def _remedy(name: str, device: torch.device, expected: Sequence[float]) -> str:
    """The setting under which the recipe agrees on this device, as a clause."""
    is_small = device.type == "cpu"
    ways = {
        "--backend emulated": ("emulated", False),
        "NARROWGAUGE_KERNELS=0": ("auto", True),
        "NARROWGAUGE_KERNELS=0 with --backend emulated": ("emulated", True),
    }
    for words, (backend, is_plain) in ways.items():
        with plain_operations() if is_plain else nullcontext():
            try:
                found = trained(small_config(name, backend, is_small), device)
            except RuntimeError:
                continue
        if _distance(found, expected) <= ALLOWED:
            return f"with {words} it agrees, so train with that"
    return "it also differs without kernels and emulated"


def trained(config: Config, device: torch.device) -> list[float]:
    """The loss of each step on the same sequences."""
    trainer, batches = Trainer.begin(config.plan, device), random_batches(config, device)
    return [trainer.train_step(iter(batches))[0] for _ in range(config.training.steps)]


def _distance(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference between the losses of a step, as a share; NaN if one is not finite."""
    return max(
        (abs(a - b) / b if abs(a - b) < float("inf") else float("inf"))
        for a, b in zip(found, expected, strict=True)
    )


def small_config(name: str, backend: str, is_small: bool) -> Config:
    """A small model and a few steps; smaller still if kernels are interpreted."""
    sizes: dict[str, Any] = {
        "dim": 256,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "ffn_dim": 768,
        "vocab_size": 1024,
    }
    steps, length, batch, micro = 4, 128, 4, 2
    if is_small:
        sizes = {"dim": 64, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 128, "vocab_size": 256}
        steps, length, batch, micro = 3, 8, 2, 1
    training = {"steps": steps, "batch_size": batch, "micro_batch_size": micro, "seed": 1, "device": "cpu"}
    return make_config(
        {
            "model": {"name": "debug"} | sizes,
            "data": {"sequence_length": length},
            "training": training,
            "optimizer": {"lr": 1e-3},
            "schedule": {"warmup_steps": 2},
            "recipe": {"name": name, "backend": backend},
        }
    )
