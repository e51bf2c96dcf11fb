"""Optimizers with low-precision state: AdamW, Muon, and learning rate schedules."""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.optim.adamw import AdamW as AdamW
    from narrowgauge.optim.grad_norm import ModelGroup as ModelGroup
    from narrowgauge.optim.groups import parameter_groups as parameter_groups
    from narrowgauge.optim.groups import set_learning_rate as set_learning_rate
    from narrowgauge.optim.loop_state import load_recipe_state as load_recipe_state
    from narrowgauge.optim.loop_state import load_state_dict as load_state_dict
    from narrowgauge.optim.loop_state import recipe_state as recipe_state
    from narrowgauge.optim.loop_state import state_dict as state_dict
    from narrowgauge.optim.muon import Muon as Muon
    from narrowgauge.optim.optimizer import Optimizer as Optimizer
    from narrowgauge.optim.schedule import ScheduleKind as ScheduleKind
    from narrowgauge.optim.schedule import decay_start as decay_start
    from narrowgauge.optim.schedule import learning_rate as learning_rate
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)
