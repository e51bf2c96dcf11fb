"""The results of an experiment over its rungs as tables, and one HTML file beside the runs."""

import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from narrowgauge.analysis.rank_correlation import rank_correlation
from narrowgauge.report.page.figures import ladder_svg
from narrowgauge.report.page.plain_page import html_table, plain_page
from narrowgauge.report.table.rungs import COLUMNS, cells
from narrowgauge.report.verdict.rows import DIVERGED, Row
from narrowgauge.report.verdict.rungs import ArmResult, arm_results

Table = tuple[Sequence[str], list[list[str]]]  # head, lines
_PROBED = {
    "loss_increase": ("loss increase", ".4f"),
    "gradient_cosine": ("cosine", ".3f"),
    "effective_bits": ("effective bits", ".1f"),
    "averaging_slope": ("averaging slope", ".2f"),
    "noise_ratio": ("gradient / noise", ".1f"),
}


def main_table(results: Sequence[ArmResult]) -> Table:
    """The highest rung: arm, gap, interval and what belongs to it, the smallest gap first."""
    last = max((result.rung for result in results), default=0)
    top = [result for result in results if result.rung == last]
    top.sort(key=lambda r: math.inf if math.isnan(r.gap.mean) else r.gap.mean)
    return COLUMNS, [cells(result) for result in top]


def rung_table(results: Sequence[ArmResult]) -> Table:
    """Every arm at every rung."""
    order = list(dict.fromkeys(result.arm for result in results))
    return COLUMNS, [cells(r) for r in sorted(results, key=lambda r: (order.index(r.arm), r.rung))]


def probe_table(probe: Mapping[str, Any], results: Sequence[ArmResult] = ()) -> Table:
    """What the probe says of each arm's recipe, from the JSON that it wrote, and whether the gaps agree.

    Below the arms stands, for each rung, Spearman's rank correlation of each column with the mean gaps, if
    three arms or more have both. A good figure is near 1, or near -1 where less is worse.
    """
    lines = []
    for arm, figures in probe["recipes"].items():
        means = [(figures.get(key) or {}).get("mean") for key in _PROBED]
        texts = [
            "-" if mean is None else f"{mean:{form}}"
            for mean, (_, form) in zip(means, _PROBED.values(), strict=True)
        ]
        lines.append([arm, *texts])
    lines += [_agreement(probe, results, rung) for rung in sorted({result.rung for result in results})]
    return ("arm", *(title for title, _ in _PROBED.values())), lines


def _agreement(probe: Mapping[str, Any], results: Sequence[ArmResult], rung: int) -> list[str]:
    """The rank correlations of the probe's columns with the gaps at a rung."""
    gaps = {r.arm: r.gap.mean for r in results if r.rung == rung and math.isfinite(r.gap.mean)}
    texts = []
    for key in _PROBED:
        found = {arm: (probe["recipes"].get(arm, {}).get(key) or {}).get("mean") for arm in gaps}
        pairs = [(mean, gaps[arm]) for arm, mean in found.items() if mean is not None]
        value = rank_correlation(*zip(*pairs, strict=True)) if len(pairs) > 2 else math.nan
        texts.append("-" if math.isnan(value) else f"{value:+.2f} ({len(pairs)})")
    return [f"Spearman with the gaps at rung {rung} (arms)", *texts]


def facts(rows: Sequence[Row], reference: str = "") -> list[str]:
    """Sentences on what was run: runs, seeds, what diverged, what is missing."""
    reference = reference or rows[0].arm
    arms = list(dict.fromkeys(row.arm for row in rows))
    seeds = {arm: {row.seed for row in rows if row.arm == arm} for arm in arms}
    most = max(len(found) for found in seeds.values())
    waits = "" if reference in arms else ", and none of its runs is finished yet"
    sentences = [f"{len(rows)} runs of {len(arms)} arms; {reference} is the reference{waits}."]
    if fewer := [f"{arm} ({len(found)})" for arm, found in seeds.items() if len(found) < most]:
        sentences.append(f"With fewer than {most} seeds: {', '.join(fewer)}.")
    diverged = [f"{row.arm}, seed {row.seed}, rung {row.rung}" for row in rows if row.status == DIVERGED]
    sentences.append(f"Diverged: {'; '.join(diverged)}." if diverged else "No run diverged.")
    return sentences


def render_page(
    rows: Sequence[Row],
    parameters: int,
    probe: Mapping[str, Any] | None = None,
    reference: str = "",
    family: Collection[str] = (),
) -> str:
    """One HTML file: the picture, the tables, what diverged, and the probe beside them.

    `reference` is the arm that the others are compared with; "": that of the first row. `family` are the arms
    that the plan asks of; (): all but the reference and controls.
    """
    reference = reference or rows[0].arm
    results = arm_results(rows, reference, family, parameters)
    body = [f"<h1>Ladder</h1><p>{escape(' '.join(facts(rows, reference)))}</p>"]
    if results:
        body.append(ladder_svg(results, parameters, reference))
        body.append("<h2>At the highest rung</h2>" + html_table(*main_table(results)))
        body.append("<h2>At every rung</h2>" + html_table(*rung_table(results)))
    if probe is not None:
        body.append("<h2>What the probe says</h2>" + html_table(*probe_table(probe, results)))
    return plain_page("Ladder", body)
