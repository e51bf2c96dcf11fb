"""The rules of the guard: when it skips a step, goes back or widens a place.

They are plain values, so that a custom training loop can use the guard without a configuration.
"""

from dataclasses import dataclass
from typing import Literal

Spike = Literal["off", "warn", "skip", "rollback", "raise"]


@dataclass(frozen=True)
class GuardRules:
    """The reactions to a step that is not finite, or a spike (`guard`)."""

    max_skips: int = 10  # steps skipped in a row before the run ends
    spike: Spike = "warn"  # the reaction to a spike
    # a spike is this many deviations of the loss above its median, or times the median norm
    spike_factor: float = 6.0
    spike_window: int = 128  # steps that a spike is compared with
    max_rollbacks: int = 3  # rollbacks of a run before it ends
    raise_to: str = ""  # the cast that an operand is widened to; "": the recipe's compute format
    check_every: int = 1000  # steps between comparisons of replicas; 0: only before a save
    replay_every: int = 0  # steps between two that are computed twice; 0: none
