"""The gap that a comparison will be able to detect: the power of the `rule` that judges it.

Gaps of n seeds with deviation sigma have a mean whose error is sigma / sqrt(n). The rule estimates sigma as
s = u sigma, where u is distributed like a root of chi-squared and raised by the known deviation, and calls a
gap proven beyond c s / sqrt(n). So it detects a true gap g with probability

    E_u [Phi(g sqrt(n) / sigma - c u) + Phi(-g sqrt(n) / sigma - c u)]

and finds two equal recipes equal within a margin m with E_u [2 Phi(m sqrt(n) / sigma - t u) - 1]. Both
factors, c and t, increase with the number of arms and decrease with the number of gaps over which s is
pooled.

Before the runs, sigma is taken from pairs of earlier runs. The luck of a warm-up that spikes dominates the
gap, and with few tokens per parameter the curves are still steep. Initial weights by role
(`model.initial_std` = 0) are expected not to spike; if one does, its runs are judged as others that do.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtr

from narrowgauge.trainer.report.verdict.rule import (
    MARGIN,
    Arm,
    FloatArray,
    Gaps,
    Spread,
    critical_value,
    equality_factor,
    judge,
    known_deviation,
    least,
    quiet_warmup,
    spread_nodes,
)

_MOST = 200
_POWER = 0.8
_FEW = 3  # seeds that a comparison with one is advised to use
_FINE = 0.1  # percent; the margin of docs/evidence.md


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan: the number of arms without the reference, and of seeds of each."""

    seeds: int
    deviation: float  # the standard deviation of a gap in percent that the plan assumes
    arms: int = 1
    known: float = 0.0  # the known deviation that the rule will use; 0 if unknown

    @property
    def degrees(self) -> int:
        """Degrees of freedom of the pooled deviation."""
        return (self.seeds - 1) * self.arms

    def chance(self, of: Callable[[FloatArray], FloatArray]) -> float:
        """The mean of a probability over the deviations that the rule may estimate, relative to the true."""
        nodes, weights = spread_nodes(self.degrees)
        spreads = [Spread(u * self.deviation, self.degrees, self.known).deviation for u in nodes]
        return float(weights @ of(np.array(spreads) / self.deviation))

    def chance_to_see(self, gap: float) -> float:
        """The probability that the rule calls an arm with this true gap different."""
        at, c = gap * math.sqrt(self.seeds) / self.deviation, critical_value(self.arms, self.degrees)
        return self.chance(lambda u: ndtr(at - c * u) + ndtr(-at - c * u))

    def chance_to_equal(self, margin: float = MARGIN) -> float:
        """The probability that the rule calls an arm equal that is equal to the reference."""
        at, t = margin * math.sqrt(self.seeds) / self.deviation, equality_factor(self.arms, self.degrees)
        return self.chance(lambda u: np.maximum(2 * ndtr(at - t * u) - 1, 0.0))


def smallest_gap(plan: Plan) -> float:
    """The gap in percent that a plan detects in 8 of 10 experiments; infinite for one seed.

    >>> round(smallest_gap(Plan(5, 0.4)), 2), round(smallest_gap(Plan(5, 0.4, arms=7)), 2)
    (0.67, 0.65)
    """
    if plan.seeds < 2:
        return math.inf
    return least(lambda gap: plan.chance_to_see(gap) >= _POWER, plan.deviation)


def seeds_for_equality(plan: Plan, margin: float = MARGIN) -> int | None:
    """The smallest number of seeds with which a plan finds equal recipes equal within a margin in 8 of 10
    cases; None above 200.

    >>> seeds_for_equality(Plan(2, 0.1)), seeds_for_equality(Plan(2, 0.4))
    (4, 24)
    """
    counts = range(2, _MOST + 1)
    at = bisect_left(counts, _POWER, key=lambda n: replace(plan, seeds=n).chance_to_equal(margin))
    return counts[at] if at < len(counts) else None


def power_text(
    seeds: int, arms: int, tokens: int, parameters: int, gaps: Gaps[Arm], is_quiet: bool = False
) -> str:
    """The detectable gap of a plan, in words; `arms` are without reference and controls, `gaps` those of
    existing runs, in percent.
    """
    ratio, arms = tokens / parameters, max(arms, 1)
    deviation = known = known_deviation(ratio, is_quiet)
    source = "known of such lengths"
    if is_quiet:
        of = quiet_warmup()
        source = f"without spikes in the warm-up: {of.low:.2g} .. {of.high:.2g} %, {of.seeds} seeds"
    judged = [one for one in judge(gaps, list(gaps), known).values() if one.seeds > 2 and one.spread]
    if (widest := max(judged, key=lambda one: one.degrees, default=None)) and widest.spread:
        deviation, source = widest.spread.deviation, "measured here"
    plan = Plan(seeds, deviation, arms, known)
    needed = [seeds_for_equality(plan, margin) or f"more than {_MOST}" for margin in (_FINE, MARGIN)]
    at_once = "" if arms == 1 else f", for all {arms} variants at once"
    who = f"{seeds} seeds detect"
    if seeds < 2:
        plan, who = replace(plan, seeds=_FEW), f"One seed proves no gap; --seeds {_FEW} detects"
    length = f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"
    return (
        f"{length} tokens per parameter. {who} a gap of {smallest_gap(plan):.2g} % in 8 of 10 cases"
        f"{at_once}. To prove two recipes equal takes {needed[1]} seeds within {MARGIN} %, {needed[0]} "
        f"within {_FINE} %. Assumed: gaps deviate by {deviation:.2g} % between seeds ({source})."
    )
