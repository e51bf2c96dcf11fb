"""The amax of a tensor over several steps: delayed scaling, and an amax measured once every n steps.

`nn.histories` keeps the values from step to step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from narrowgauge.quantization.stages import Names, Rules, Stage

ALGORITHMS = ("max", "most_recent")


@dataclass(frozen=True, slots=True, kw_only=True)
class AmaxOverTime(Stage):
    """The steps that the amax of a tensor's scale comes from; by default the current one.

    Attributes:
        history: 0 computes the scale from the tensor itself, n from its amax in the last n steps (delayed
            scaling).
        algorithm: "max" of the history, or its "most_recent" entry.
        margin: With a history, the number of binades left free above the amax.
        refresh: 0 measures the amax of an outer scale in every step; n measures it once every n steps and
            holds it in between.
    """

    history: int = 0
    algorithm: str = "max"
    margin: int = 0
    refresh: int = 0
    KEYS: ClassVar[Mapping[str, str]] = {
        **{"history": "history", "history_algorithm": "algorithm", "margin": "margin", "refresh": "refresh"}
    }
    NAMES: ClassVar[Names] = {"history algorithm": ("algorithm", ALGORITHMS)}

    def rules(self) -> Rules:
        """The rules of its keys."""
        return [
            ("refresh", self.refresh == 0 or self.refresh > 1, "it is a number of steps, two or more"),
            ("history", self.history >= 0, "it must be a number of steps"),
            ("margin", 0 <= self.margin < 64, "it must lie in 0 to 63"),
        ]
