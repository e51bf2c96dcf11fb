"""The statistics of a ladder: paired gaps, difference, equivalence, many arms, extra tokens.

    gap         100 (L / L_reference - 1) of one seed and rung: same initial weights, same tokens in order
    difference  Student's t over the gaps of the seeds, two-sided
    equal       two one-sided t tests (Schuirmann 1987): |gap| < margin, p is the larger of the two
    Holm        p values of all arms of a rung, ascending, times k, k - 1, ..., made monotone (Holm 1979)
    extra       how many percent more tokens the arm needs than the reference for the loss that it reached

For the extra tokens, the reference's loss of the same seed is read off as a function of its tokens D: between
two rungs ln L is linear in ln D, and outside the line of the nearest two rungs goes on. If D' is where the
reference has the arm's loss at D, the extra tokens are 100 (D / D' - 1).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from narrowgauge.report.compare.power import MARGIN
from narrowgauge.report.ladder.results import DIVERGED, Row
from narrowgauge.t_interval import Interval, interval, t_probability

LEVEL = 0.05
NAN = math.nan


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm at one rung against the reference; gaps in percent, by seed.

    Attributes:
        gaps: By the own forward pass, of the seeds that both arms have.
        bf16_gaps: By the bf16 forward pass of the same weights, of both arms.
        gap: Mean and interval of `gaps`; NaN without any.
        extra: Mean and interval of the extra tokens in percent; NaN with a single rung.
        diverged: How many seeds diverged.
        p_difference: Of the two-sided test, Holm's over the arms of the rung.
        p_equal: Of the two one-sided tests, Holm's likewise.
    """

    arm: str
    rung: int
    tokens: int
    gaps: tuple[float, ...]
    bf16_gaps: tuple[float, ...]
    gap: Interval
    bf16_gap: Interval
    extra: Interval
    diverged: int
    p_difference: float = NAN
    p_equal: float = NAN

    @property
    def deviation(self) -> float:
        """Standard deviation of the gaps; NaN for fewer than two."""
        return statistics.stdev(self.gaps) if len(self.gaps) > 1 else NAN

    @property
    def verdict(self) -> str:
        """The verdict by the rule of the page."""
        if self.diverged:
            return "diverges"
        is_equal = self.p_equal < LEVEL
        if self.p_difference < LEVEL:
            word = "worse" if self.gap.mean > 0 else "better"
            return f"{word}, within {MARGIN} %" if is_equal else word
        return f"equal within {MARGIN} %" if is_equal else "open"


def arm_results(rows: Sequence[Row], reference: str = "") -> list[ArmResult]:
    """The results of all arms but the reference ("": the arm of the first row), by rung and arm."""
    if not rows:
        return []
    by_key = {(row.arm, row.seed, row.rung): row for row in rows}
    reference = reference or rows[0].arm
    arms = [arm for arm in dict.fromkeys(row.arm for row in rows) if arm != reference]
    results = []
    for rung in sorted({row.rung for row in rows}):
        found = [one for arm in arms if (one := _result(by_key, reference, arm, rung)) is not None]
        results += _with_p_values(found)
    return results


def _result(
    by_key: Mapping[tuple[str, int, int], Row], reference: str, arm: str, rung: int
) -> ArmResult | None:
    rows = [row for (a, _, r), row in by_key.items() if a == arm and r == rung]
    pairs = [
        (row, base)
        for row in rows
        if (base := by_key.get((reference, row.seed, rung))) is not None
        and DIVERGED not in (row.status, base.status)
    ]
    diverged = sum(row.status == DIVERGED for row in rows)
    if not pairs and not diverged:
        return None
    gaps = tuple(gap_percent(row.own_loss, base.own_loss) for row, base in pairs)
    bf16 = tuple(gap_percent(row.bf16_loss, base.bf16_loss) for row, base in pairs)
    curves = {row.seed: _curve(by_key, reference, row.seed) for row, _ in pairs}
    extra = [extra_tokens(row.own_loss, row.tokens, curves[row.seed]) for row, _ in pairs]
    known = [x for x in extra if math.isfinite(x)]
    tokens = rows[0].tokens
    gap, bf16_gap, more = _interval(gaps), _interval(bf16), _interval(known)
    return ArmResult(arm, rung, tokens, gaps, bf16, gap, bf16_gap, more, diverged)


def _interval(values: Sequence[float]) -> Interval:
    return interval(values) if values else Interval(NAN, NAN, NAN)


def gap_percent(loss: float, reference: float) -> float:
    """The excess of a loss in percent."""
    return 100 * (loss / reference - 1)


def _curve(by_key: Mapping[tuple[str, int, int], Row], arm: str, seed: int) -> list[tuple[float, float]]:
    """(tokens, loss) of an arm and seed at its rungs, ascending."""
    rows = [row for (a, s, _), row in by_key.items() if (a, s) == (arm, seed) and row.status != DIVERGED]
    return sorted((row.tokens, row.own_loss) for row in rows)


def extra_tokens(loss: float, tokens: int, curve: Sequence[tuple[float, float]]) -> float:
    """By how many percent `tokens` exceed those at which the curve has `loss`; NaN if it cannot be read.

    >>> round(extra_tokens(2.0, 4, [(1, 4.0), (4, 2.0), (16, 1.0)]), 6)
    0.0
    >>> round(extra_tokens(2.0, 8, [(1, 4.0), (4, 2.0), (16, 1.0)]), 6)
    100.0
    """
    points = [(math.log(d), math.log(value)) for d, value in curve]
    if len(points) < 2 or not loss > 0:
        return NAN
    y = math.log(loss)
    pieces = list(pairwise(points))
    left, right = next((piece for piece in pieces if y >= piece[1][1]), pieces[-1])  # that falls so far
    slope = (right[1] - left[1]) / (right[0] - left[0])
    if slope >= 0:
        return NAN
    return 100 * (tokens / math.exp(left[0] + (y - left[1]) / slope) - 1)


def p_of_difference(values: Sequence[float]) -> float:
    """Two-sided p value of a mean of zero; NaN for fewer than two values."""
    t = _t_of(values, 0.0)
    return NAN if math.isnan(t) else 1.0 - _central(abs(t), len(values) - 1)


def p_of_equality(values: Sequence[float], margin: float = MARGIN) -> float:
    """The larger p value of the two one-sided tests that the mean lies within the margin."""
    lower, upper = _t_of(values, -margin), _t_of(values, margin)
    if math.isnan(lower):
        return NAN
    degrees = len(values) - 1
    return max(_above(lower, degrees), _above(-upper, degrees))


def _t_of(values: Sequence[float], mean: float) -> float:
    """Student's t of the values against a mean; infinite if all are equal and another number."""
    if len(values) < 2:
        return NAN
    excess, deviation = statistics.fmean(values) - mean, statistics.stdev(values)
    if deviation == 0:
        return math.copysign(math.inf, excess) if excess else 0.0
    return excess * math.sqrt(len(values)) / deviation


def _central(t: float, degrees: int) -> float:
    return 1.0 if math.isinf(t) else t_probability(t, degrees)


def _above(t: float, degrees: int) -> float:
    """Probability that a Student variable exceeds t."""
    half = _central(abs(t), degrees) / 2
    return 0.5 - half if t >= 0 else 0.5 + half


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values; a NaN stays and does not count.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    adjusted, largest = list(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def _with_p_values(results: Sequence[ArmResult]) -> list[ArmResult]:
    difference = holm([p_of_difference(one.gaps) for one in results])
    equal = holm([p_of_equality(one.gaps) for one in results])
    return [
        replace(one, p_difference=d, p_equal=e) for one, d, e in zip(results, difference, equal, strict=True)
    ]
