"""How do weights move, and what is their state kept in? AdamW, and the learning rate's schedule."""

from narrowgauge.optim.adamw import AdamW
from narrowgauge.optim.groups import decay_groups, set_learning_rate
from narrowgauge.optim.schedule import Kind, learning_rate

__all__ = ["AdamW", "Kind", "decay_groups", "learning_rate", "set_learning_rate"]
