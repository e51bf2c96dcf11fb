"""How do weights move? AdamW on fp32 state, and the learning rate's schedule."""

from narrowgauge.optim.adamw import make_adamw, optimizer_tensors, restore_optimizer, set_learning_rate
from narrowgauge.optim.schedule import Kind, learning_rate

__all__ = [
    "Kind",
    "learning_rate",
    "make_adamw",
    "optimizer_tensors",
    "restore_optimizer",
    "set_learning_rate",
]
