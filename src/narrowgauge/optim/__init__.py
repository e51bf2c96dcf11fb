"""How do weights move, and what is their state kept in? AdamW, Muon, the learning rate's schedule."""

from narrowgauge.optim.adamw import AdamW
from narrowgauge.optim.grad_norm import ModelGroup
from narrowgauge.optim.groups import parameter_groups, set_learning_rate
from narrowgauge.optim.loop_state import load_recipe_state, load_state_dict, recipe_state, state_dict
from narrowgauge.optim.muon import Muon
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.schedule import ScheduleKind, decay_start, learning_rate

__all__ = [
    "AdamW",
    "ModelGroup",
    "Muon",
    "Optimizer",
    "ScheduleKind",
    "decay_start",
    "learning_rate",
    "load_recipe_state",
    "load_state_dict",
    "parameter_groups",
    "recipe_state",
    "set_learning_rate",
    "state_dict",
]
