"""What a comparison will be able to see, said before it starts.

The gaps of n seeds with standard deviation s have a mean whose error is s / sqrt(n). By Student's t with n -
1 degrees of freedom, a true gap is found (at 5 %, two-sided) in 8 of 10 experiments if it is at least

    (t[0.95] + t[0.6]) s / sqrt(n)          t[c]: the central share c lies within it; 0.6 leaves 20 % above

and two equal recipes are found equal within a margin m (two one-sided tests at 5 %) in 8 of 10 if

    (t[0.9] + t[0.8]) s / sqrt(n) <= m      10 % are lost on each side

s is not known before the runs. It is taken from pairs of runs that were trained: with less than one token for
each parameter the curves are still steep, and the luck of the warm-up is most of the gap.
"""

import math
import statistics
from collections.abc import Sequence

from narrowgauge.t_interval import t_quantile

MARGIN = 0.25  # percent; the equality that reports of FP8 training claim (DeepSeek-V3, arXiv 2412.19437)
_MOST = 200

#: Paired standard deviation of the gap in percent, by the tokens for each parameter up to which it holds.
KNOWN = (
    (1.0, 0.5, "docs/lab-log.md: 5 M parameters, 0.2 tokens each"),
    (3.0, 0.7, "docs/evidence.md: 0.38 to 0.86 % at 0.85 M parameters, 1.0 and 1.9 tokens each"),
    (math.inf, 0.4, "docs/evidence.md: 0.39 and 0.40 % there, 3.8 tokens each"),
)


def known_deviation(tokens_per_parameter: float) -> float:
    """The paired standard deviation in percent that earlier runs of such a length had.

    >>> known_deviation(0.2), known_deviation(12)
    (0.5, 0.4)
    """
    return next(deviation for limit, deviation, _ in KNOWN if tokens_per_parameter < limit)


def smallest_gap(seeds: int, deviation: float) -> float:
    """The gap that so many seeds find in 8 of 10 experiments; infinite for one seed.

    >>> round(smallest_gap(5, 0.1), 3)
    0.166
    """
    if seeds < 2:
        return math.inf
    return (t_quantile(seeds - 1) + t_quantile(seeds - 1, 0.6)) * deviation / math.sqrt(seeds)


def seeds_for_equality(deviation: float, margin: float = MARGIN) -> int | None:
    """The least number of seeds that find two equal recipes equal within a margin; None if over 200.

    >>> seeds_for_equality(0.1), seeds_for_equality(0.5)
    (4, 36)
    """
    for n in range(2, _MOST + 1):
        if (t_quantile(n - 1, 0.9) + t_quantile(n - 1, 0.8)) * deviation / math.sqrt(n) <= margin:
            return n
    return None


def power_text(seeds: int, tokens: int, parameters: int, gaps: Sequence[Sequence[float]] = ()) -> str:
    """What a plan will be able to see, in words.

    Args:
        seeds: The number of seeds of each variant.
        tokens: Tokens of a run.
        parameters: Parameters of the model in linear layers, without the head.
        gaps: The gaps in percent of each variant, by seed, of runs that exist already.
    """
    measured = [
        statistics.variance(group) for group in gaps if len(group) > 2 and all(map(math.isfinite, group))
    ]
    if measured:
        deviation, source = math.sqrt(statistics.fmean(measured)), "measured here"
    else:
        deviation, source = known_deviation(tokens / parameters), "known of such lengths"
    ratio = tokens / parameters
    many = seeds_for_equality(deviation)
    needed = f"more than {_MOST}" if many is None else str(many)
    if seeds < 2:
        seen = "one seed has no interval and proves no gap"
    else:
        seen = f"{seeds} seeds see a gap of {smallest_gap(seeds, deviation):.2g} % in 8 of 10 cases"
    return (
        f"{ratio:.2g} tokens a parameter: {seen}, if gaps of seeds deviate by {deviation:.2g} % ({source}); "
        f"to call two recipes equal within {MARGIN} % takes {needed} seeds"
    )
