"""The sections of the page on the rungs of a measured experiment: a picture and tables."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from narrowgauge.analysis.rank_correlation import rank_correlation
from narrowgauge.report.page.figures import rungs_svg
from narrowgauge.report.page.plain_page import html_table
from narrowgauge.report.table.rungs import COLUMNS, cells
from narrowgauge.report.table.table import TEXT_COLUMNS
from narrowgauge.report.verdict.rows import DIVERGED, Row
from narrowgauge.report.verdict.rungs import ArmResult

Table = tuple[Sequence[str], list[list[str]]]  # head, lines
_PROBED = {
    "loss_increase": ("loss increase", ".4f"),
    "gradient_cosine": ("cosine", ".3f"),
    "effective_bits": ("effective bits", ".1f"),
    "averaging_slope": ("averaging slope", ".2f"),
    "noise_ratio": ("gradient / noise", ".1f"),
}


def rung_table(results: Sequence[ArmResult]) -> Table:
    """Every arm at every rung."""
    order = list(dict.fromkeys(result.arm for result in results))
    return COLUMNS, [cells(r) for r in sorted(results, key=lambda r: (order.index(r.arm), r.rung))]


def probe_table(probe: Mapping[str, Any], results: Sequence[ArmResult] = ()) -> Table:
    """The figures of the probe for each arm's recipe, from its JSON, and their agreement with the gaps.

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


def facts(rows: Sequence[Row]) -> list[str]:
    """Sentences on the runs: their number, the seeds of each arm, and which diverged."""
    arms = list(dict.fromkeys(row.arm for row in rows))
    seeds = {arm: {row.seed for row in rows if row.arm == arm} for arm in arms}
    most = max(len(found) for found in seeds.values())
    sentences = [f"{len(rows)} runs of {len(arms)} arms; {arms[0]} is the reference."]
    if fewer := [f"{arm} ({len(found)})" for arm, found in seeds.items() if len(found) < most]:
        sentences.append(f"With fewer than {most} seeds: {', '.join(fewer)}.")
    diverged = [f"{row.arm}, seed {row.seed}, rung {row.rung}" for row in rows if row.status == DIVERGED]
    sentences.append(f"Diverged: {'; '.join(diverged)}." if diverged else "No run diverged.")
    return sentences


def rungs_section(
    rows: Sequence[Row], results: Sequence[ArmResult], parameters: int, probe: Mapping[str, Any] | None
) -> str:
    """The sections of a page that a measured experiment adds: gaps over its rungs, and the probe.

    Args:
        rows: The results of runs, those of the reference among them.
        results: The results of the arms.
        parameters: Parameters in linear layers, for which tokens are counted.
        probe: The figures of `narrowgauge probe` for each arm's recipe; None without them.
    """
    text = escape(" ".join(facts(rows)))
    parts = [f"<section><h2>Gaps over the lengths of training</h2><p>{text}</p>"]
    if results:
        parts += [rungs_svg(results, parameters, rows[0].arm), _table("Every rung", rung_table(results))]
    parts.append("</section>")
    if probe is not None:
        parts.append("<section><h2>The probe of each recipe</h2>")
        parts.append(_table("The probe", probe_table(probe, results)) + "</section>")
    return "".join(parts)


def _table(name: str, table: Table) -> str:
    text = html_table(*table, text=TEXT_COLUMNS)
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">{text}</div>'
