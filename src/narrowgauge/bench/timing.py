"""Times that mean something on a machine that others use, too.

A ceiling is the best of several tries: whatever disturbs a measurement makes it longer, never shorter. A
comparison is a ratio of two that took turns, so that a disturbance meets both; the median of the ratios is
given with their quartiles.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from narrowgauge.training.monitor.hardware import synchronize

_BUDGET_S = 0.5  # for one ceiling
_MOST, _LEAST = 50, 3  # tries


def best_seconds(action: Callable[[], object], device: torch.device, budget_s: float = _BUDGET_S) -> float:
    """The shortest of several calls, after one that is not counted."""
    action()
    best, spent, tries = float("inf"), 0.0, 0
    while tries < _LEAST or (spent < budget_s and tries < _MOST):
        taken = seconds(action, device)
        best, spent, tries = min(best, taken), spent + taken, tries + 1
    return best


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Of one call, to the end of what it began."""
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


@dataclass(frozen=True)
class Spread:
    """The median of some figures, and their quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """Of at least one figure."""
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def take_turns(steps: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each answers, its seconds, `rounds` times; who begins changes from round to round."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        names = list(steps)
        for name in names if turn % 2 == 0 else reversed(names):
            taken[name].append(steps[name]())
    return taken
