"""Which parameters decay: matrices do, vectors (norms, biases) do not."""

from typing import Any

import torch


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameter groups of a model's trainable parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
