"""The rules of the guard: when it skips a step, goes back or widens a place.

They are plain values, so that a custom training loop can use the guard without a configuration.
"""

import math
from dataclasses import dataclass
from typing import Literal

Spike = Literal["off", "warn", "skip", "rollback", "raise"]


@dataclass(frozen=True)
class GuardRules:
    """The reactions to a step that is not finite, or a spike (`guard`).

    Attributes:
        max_skips: Steps skipped in a row before the run ends.
        spike: The reaction to a spike.
        spike_factor: A spike is this many deviations of the loss above its median, or times the median norm.
        spike_window: Steps that a spike is compared with.
        max_rollbacks: Rollbacks of a run before it ends.
        raise_to: The cast that an operand is widened to; "": the recipe's compute format.
        raise_steps: Steps that a place stays wide; infinity: for good.
        raise_budget: The most places that a run widens.
        lower_after: Steps until a place is lowered again if its gauges allow it; 0: never.
        check_every: Steps between comparisons of replicas; 0: only before a save.
        replay_every: Steps between two that are computed twice; 0: none.
    """

    max_skips: int = 10
    spike: Spike = "warn"
    spike_factor: float = 6.0
    spike_window: int = 128
    max_rollbacks: int = 3
    raise_to: str = ""
    raise_steps: float = math.inf
    raise_budget: int = 4
    lower_after: int = 0
    check_every: int = 1000
    replay_every: int = 0
