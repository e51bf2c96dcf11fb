"""Comparisons on a machine shared with other programs.

A comparison is a ratio of two workers that take turns, so that a disturbance affects both. It is reported as
the median of the ratios with their quartiles.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The median and quartiles of some values."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """The spread of one or more values."""
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


FEWEST = 5  # rounds needed for meaningful quartiles


def speed_in_words(ratios: Sequence[float]) -> str:
    """A speed ratio in words, no stronger than its spread allows.

    A ratio is "faster" or "slower" only if both quartiles are on the same side of 1.

    >>> speed_in_words([1.9, 1.86, 1.8, 1.84, 1.92]), speed_in_words([0.57, 0.55, 0.6, 0.56, 0.58])
    ('faster, 1.86x [1.84, 1.90]', 'slower, 0.57x [0.56, 0.58]')
    >>> speed_in_words([0.9, 1.1, 1.0, 1.05, 0.95]), speed_in_words([1.4, 1.3])
    ('as fast within the spread, 1.00x [0.95, 1.05]', 'open, 1.35x in 2 rounds')
    """
    spread = Spread.of(ratios)
    if len(ratios) < FEWEST:
        return f"open, {spread.median:.2f}x in {len(ratios)} round{'s' * (len(ratios) != 1)}"
    low, high = round(spread.low, 2), round(spread.high, 2)  # as they are printed
    word = "faster" if low > 1 else "slower" if high < 1 else "as fast within the spread"
    return f"{word}, {spread.median:.2f}x [{spread.low:.2f}, {spread.high:.2f}]"


def take_turns(steps: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each step `rounds` times, taking turns; every other round runs in reverse order.

    Returns:
        name -> the values that its step returned (seconds), round by round.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        names = list(steps)
        for name in names if turn % 2 == 0 else reversed(names):
            times[name].append(steps[name]())
    return times
