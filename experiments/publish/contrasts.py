"""Contrasts beside the gaps: against each run of the reference, growth with tokens, and shares of a gap.

Half of a gap's noise is the reference's own, and it is the same for all arms. Where the reference was trained
twice (`is_control`), each contrast is therefore taken to the first, to the second, and to the mean of both.

The share of a whole gap y that a part x makes is the ratio of their means over seeds. Its interval is
Fieller's (1954): the ratios r for which Student's t does not refuse that x - r y has the mean 0.
"""

import math
import statistics
from collections.abc import Sequence

from narrowgauge.system.t_interval import Interval, interval, t_quantile
from narrowgauge.trainer.report.verdict.rule import is_control
from narrowgauge.trainer.report.verdict.verdict import DIVERGED, Row
from publish.predictions import Prediction, gaps_of

MEAN = "mean of both"
_FORWARD = "-forward"  # ends the name of an arm that is narrow in the forward pass alone


def with_mean_reference(rows: Sequence[Row]) -> tuple[list[str], list[Row]]:
    """The names of the references, and the rows together with the mean of both references."""
    first = rows[0].arm
    again = {(row.seed, row.rung): row for row in rows if row.arm == f"{first}-again"}
    means = [
        row._replace(
            arm=MEAN,
            own_loss=(row.own_loss + other.own_loss) / 2,
            bf16_loss=(row.bf16_loss + other.bf16_loss) / 2,
        )
        for row in rows
        if row.arm == first and (other := again.get((row.seed, row.rung))) is not None
        if DIVERGED not in (row.status, other.status)
    ]
    return ([first, f"{first}-again", MEAN] if means else [first]), [*rows, *means]


def unpaired_deviation(rows: Sequence[Row], rung: int) -> float:
    """The deviation in percent that a gap between runs of different seeds has; NaN without several seeds."""
    losses: dict[str, list[float]] = {}
    for row in rows:
        if row.rung == rung and row.status != DIVERGED:
            losses.setdefault(row.arm, []).append(row.own_loss)
    several = [values for values in losses.values() if len(values) > 1]
    if not several:
        return math.nan
    variance = 2 * statistics.fmean(map(statistics.variance, several))
    return 100 * math.sqrt(variance) / statistics.fmean(map(statistics.fmean, several))


def growth(rows: Sequence[Row]) -> list[tuple[str, str, Interval, Interval]]:
    """(arm, reference, gap at the highest rung, its growth since the lowest), with Student's intervals.

    Arms with one seed, controls and references are left out.
    """
    references, rows = with_mean_reference(rows)
    low, high = (of(row.rung for row in rows) for of in (min, max))
    arms = [a for a in dict.fromkeys(r.arm for r in rows) if a not in references]
    found = []
    for arm in (arm for arm in arms if not is_control(arm, references[0])):
        for reference in references:
            gaps = gaps_of(_gap(arm, reference, high), rows)
            grown = gaps_of(_gap(arm, reference, high, low), rows)
            if len(grown) > 1:
                found.append((arm, reference, interval(gaps), interval(grown)))
    return found


def shares(rows: Sequence[Row]) -> list[tuple[str, str, str, Interval, list[float]]]:
    """(part, whole, reference, share of the whole's gap at the highest rung, share by seed), in percent."""
    references, rows = with_mean_reference(rows)
    high = max(row.rung for row in rows)
    losses = {
        (row.arm, row.seed): row.own_loss for row in rows if row.rung == high and row.status != DIVERGED
    }
    found = []
    for part in dict.fromkeys(arm for arm, _ in losses if arm.endswith(_FORWARD)):
        whole = part.removesuffix(_FORWARD)
        for reference in references:
            pairs = [
                (losses[part, seed] / base - 1, losses[whole, seed] / base - 1)
                for (arm, seed), base in losses.items()
                if arm == reference and (part, seed) in losses and (whole, seed) in losses
            ]
            if len(pairs) > 1:
                x, y = ([100 * pair[i] for pair in pairs] for i in (0, 1))
                by_seed = [100 * a / b for a, b in zip(x, y, strict=True)]
                found.append((part, whole, reference, ratio_interval(x, y), by_seed))
    return found


def ratio_interval(x: Sequence[float], y: Sequence[float]) -> Interval:
    """The ratio of two means of paired values in percent, with Fieller's interval; NaN ends if it has none.

    >>> share = ratio_interval([9.0, 10.0, 12.0], [18.0, 20.0, 22.0])
    >>> round(share.mean, 1), round(share.low, 1), round(share.high, 1)
    (51.7, 42.9, 57.3)
    """
    n = len(x)
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    shrink = t_quantile(n - 1) ** 2 / n
    a = mean_y**2 - shrink * statistics.variance(y)
    b = mean_x * mean_y - shrink * statistics.covariance(x, y)
    c = mean_x**2 - shrink * statistics.variance(x)
    ratio = mean_x / mean_y
    if a <= 0:  # the whole may be zero, and the share anything
        return Interval(100 * ratio, math.nan, math.nan)
    root = math.sqrt(max(b * b - a * c, 0.0))
    return Interval(100 * ratio, 100 * (b - root) / a, 100 * (b + root) / a)


def _gap(arm: str, against: str, rung: int, before: int = 0) -> Prediction:
    """The gap of one arm to another by the own forward pass, as predictions name it."""
    return Prediction(arm, against, "own", rung, before, 0.0, 0.0, "")


def share_cells(share: Interval, by_seed: Sequence[float]) -> list[str]:
    """A share, its interval, and the shares by seed, in whole percent."""
    ends = "-" if math.isnan(share.low) else f"{share.low:.0f} .. {share.high:.0f} %"
    return [f"{share.mean:.0f} %", ends, ", ".join(f"{x:.0f}" for x in by_seed)]
