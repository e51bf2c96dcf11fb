"""The rules of the guard: when it skips a step, goes back or widens a place.

They are plain values, so that a custom training loop can use the guard without a configuration.
"""

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
        check_every: Steps between comparisons of replicas; 0: only before a save.
        replay_every: Steps between two that are computed twice; 0: none.
    """

    max_skips: int = 10
    spike: Spike = "warn"
    spike_factor: float = 6.0
    spike_window: int = 128
    max_rollbacks: int = 3
    raise_to: str = ""
    check_every: int = 1000
    replay_every: int = 0
