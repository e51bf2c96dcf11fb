"""Does the probe rank recipes as their training does? Rank correlations over the arms of ladder 2.

The figures are those of docs/evidence/probe.json, which were measured on one bf16 model of ladder 1; the gaps
are those of the own forward pass. The interval of Spearman's rho over n arms is Fisher's, with the variance
of Bonett and Wright (Psychometrika 65, 2000):

    atanh(rho) +- 1.96 sqrt((1 + rho^2 / 2) / (n - 3))
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from narrowgauge.trainer.analysis.rank_correlation import rank_correlation
from narrowgauge.trainer.report.verdict.verdict import Row, gap_percent
from publish.ladder2 import REFERENCE
from publish.tables import markdown

FIGURES = {"loss_increase": "loss increase", "gradient_cosine": "cosine", "effective_bits": "effective bits"}
LEAST = 6  # arms, below which an interval says nothing


def probe_markdown(probe: Mapping[str, Any], rows: Mapping[str, Sequence[Row]]) -> str:
    """A line for each part that has enough arms of the probe, from its rows."""
    lines = []
    for part, these in rows.items():
        gaps = mean_gaps(these)
        arms = [arm for arm in gaps if arm in probe["recipes"]]
        if len(arms) < LEAST:
            continue
        cells = [_cell(probe, key, {arm: gaps[arm] for arm in arms}) for key in FIGURES]
        lines.append([part, str(len(arms)), *cells])
    if not lines:
        return "No part has enough arms yet.\n"
    return markdown(("part", "arms", *FIGURES.values()), lines, left=("part",))


def mean_gaps(rows: Sequence[Row]) -> dict[str, float]:
    """The mean gap of each arm over its seeds, in percent."""
    base = {row.seed: row.own_loss for row in rows if row.arm == REFERENCE}
    gaps: dict[str, list[float]] = {}
    for row in rows:
        if row.arm != REFERENCE and row.seed in base and math.isfinite(row.own_loss):
            gaps.setdefault(row.arm, []).append(gap_percent(row.own_loss, base[row.seed]))
    return {arm: statistics.fmean(values) for arm, values in gaps.items()}


def _cell(probe: Mapping[str, Any], key: str, gaps: Mapping[str, float]) -> str:
    means = {arm: (probe["recipes"][arm].get(key) or {}).get("mean") for arm in gaps}
    pairs = [(mean, gaps[arm]) for arm, mean in means.items() if mean is not None]
    if len(pairs) < LEAST:
        return "-"
    low, rho, high = spearman(*zip(*pairs, strict=True))
    return f"{rho:+.2f} ({low:+.2f} .. {high:+.2f})"


def spearman(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Spearman's rho between the ends of its 95 % interval.

    >>> [round(one, 3) for one in spearman(range(10), [1, 0, 2, 3, 5, 4, 6, 7, 9, 8])]
    [0.8, 0.964, 0.994]
    """
    rho = rank_correlation(a, b)
    if not abs(rho) < 1:  # all ranks agree, or there are none
        return (rho, rho, rho)
    half = 1.96 * math.sqrt((1 + rho**2 / 2) / (len(a) - 3))
    return (math.tanh(math.atanh(rho) - half), rho, math.tanh(math.atanh(rho) + half))
