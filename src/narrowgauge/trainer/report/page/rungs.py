"""The sections of an experiment at several lengths: gaps over tokens, a forest plot, the probe.

The same rows give the same bytes. A gap beyond 6 % is printed with an arrow, so that the others stay visible.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from narrowgauge.forecast.svg import BAND, COLORS, RULE, ZERO, Axis, Drawing
from narrowgauge.trainer.analysis.rank_correlation import rank_correlation
from narrowgauge.trainer.report.page.html import Table, part
from narrowgauge.trainer.report.table.table import TEXT_COLUMNS
from narrowgauge.trainer.report.verdict.rows import DIVERGED, Row
from narrowgauge.trainer.report.verdict.rule import MARGIN
from narrowgauge.trainer.report.verdict.verdict import Verdict

_LEFT, _TOP, _ROW = 64.0, 56.0, 22.0
_WIDTH, _CURVES, _GAP, _NAMES = 1080.0, 380.0, 56.0, 190.0
_LARGEST = 6.0  # percent; larger gaps are drawn as arrows
Lines = tuple[Sequence[str], list[list[str]]]  # head, lines
_PROBED = {
    "loss_increase": ("loss increase", ".4f"),
    "gradient_cosine": ("cosine", ".3f"),
    "effective_bits": ("effective bits", ".1f"),
    "averaging_slope": ("averaging slope", ".2f"),
    "noise_ratio": ("gradient / noise", ".1f"),
}


def rungs_svg(results: Sequence[Verdict], parameters: int, reference: str) -> str:
    """Both plots in one drawing; `parameters` is the count to which tokens are related."""
    last = max(result.rung for result in results)
    top = [result for result in results if result.rung == last]
    top.sort(key=lambda r: math.inf if math.isnan(r.alone.mean) else r.alone.mean)
    colors = {result.name: COLORS[i % len(COLORS)] for i, result in enumerate(top)}
    bottom = _TOP + max(len(top) * _ROW, 260.0)
    shown = [r.at_once for r in results if abs(r.alone.mean) <= _LARGEST]
    ends = [end for gap in shown for end in (gap.mean, gap.low, gap.high) if math.isfinite(end)]
    low = max(min([*ends, -2 * MARGIN]), -_LARGEST)
    high = min(max([*ends, 2 * MARGIN]), _LARGEST)
    pad = 0.04 * (high - low)
    drawing = Drawing(_WIDTH, bottom + 54, f"Gaps to {reference}")
    gaps = Axis(low - pad, high + pad, bottom, _TOP)
    _draw_curves(drawing, results, parameters, reference, colors, gaps)
    begin = _LEFT + _CURVES + _GAP + _NAMES
    _draw_forest(drawing, top, reference, colors, replace(gaps, start=begin, end=_WIDTH - 130), bottom)
    return str(drawing)


def _draw_curves(
    drawing: Drawing,
    results: Sequence[Verdict],
    parameters: int,
    reference: str,
    colors: Mapping[str, str],
    y: Axis,
) -> None:
    """The gap over tokens per parameter, a line for each arm."""
    ratios = sorted({result.tokens / parameters for result in results})
    x = Axis(ratios[0] / 1.25, ratios[-1] * 1.25, _LEFT, _LEFT + _CURVES, is_log=True)
    drawing.text(_LEFT, 24, f"Gap to {reference} over tokens for each parameter", font_weight="bold")
    drawing.rect(x.start, y(MARGIN), _CURVES, y(-MARGIN) - y(MARGIN), BAND)
    drawing.up(x, y, {tick: f"{tick:+.1f} %" if tick else "0" for tick in y.ticks(9)})
    drawing.across(x, y.start, {ratio: f"{ratio:.1f}" for ratio in ratios}, "tokens for each parameter")
    for number, (arm, color) in enumerate(colors.items()):
        mine = [r for r in results if r.name == arm and abs(r.alone.mean) <= _LARGEST]
        mine.sort(key=lambda r: r.tokens)
        shift = 2.5 * (number - (len(colors) - 1) / 2)
        at = [x(r.tokens / parameters) + shift for r in mine]
        drawing.line(at, [y(r.alone.mean) for r in mine], color, 1.5)
        for px, r in zip(at, mine, strict=True):
            if math.isfinite(r.at_once.low):
                drawing.line((px, px), (y(r.at_once.low), y(r.at_once.high)), color)
            drawing.dot(px, y(r.alone.mean), 3, color)


def _draw_forest(
    drawing: Drawing,
    top: Sequence[Verdict],
    reference: str,
    colors: Mapping[str, str],
    x: Axis,
    bottom: float,
) -> None:
    """The gap of each arm at the highest rung, with its interval and the verdict."""
    title = f"Gap at the highest rung (grey: within {MARGIN} %)"
    drawing.text(x.start - _NAMES, 24, title, font_weight="bold")
    drawing.rect(x(-MARGIN), _TOP - 8, x(MARGIN) - x(-MARGIN), bottom - _TOP + 8, BAND)
    ticks = x.ticks(most=6)  # horizontal labels take more room
    for tick in ticks:
        drawing.line((x(tick), x(tick)), (_TOP - 8, bottom), RULE if tick else ZERO)
    drawing.across(x, bottom, {tick: f"{tick:+.1f}" if tick else reference for tick in ticks}, "gap, %")
    for number, result in enumerate(top):
        y, color, gap = _TOP + _ROW * number + 8, colors[result.name], result.alone.mean
        drawing.text(x.start - 10, y + 4, result.name, "end", fill=color)
        drawing.text(x.end + 8, y + 4, result.conclusion)
        if gap > _LARGEST:
            drawing.text(x.end, y + 4, f"{gap:+.1f} % →", "end", fill=color)
        elif gap < -_LARGEST:
            drawing.text(x.start, y + 4, f"← {gap:+.1f} %", fill=color)
        elif result.gaps:
            if math.isfinite(result.at_once.low):
                drawing.line((x(result.at_once.low), x(result.at_once.high)), (y, y), color, 2)
            drawing.dot(x(gap), y, 3.5, color)


def probe_table(probe: Mapping[str, Any], results: Sequence[Verdict] = ()) -> Lines:
    """The figures of the probe for each arm's recipe, from its JSON, and their agreement with the gaps.

    Below the arms there is, for each rung, Spearman's rank correlation of each column with the mean gaps, if
    three or more arms have both. A good figure is near 1, or near -1 if less is worse.
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


def _agreement(probe: Mapping[str, Any], results: Sequence[Verdict], rung: int) -> list[str]:
    """The rank correlations of the probe's columns with the gaps at a rung."""
    gaps = {r.name: r.alone.mean for r in results if r.rung == rung and math.isfinite(r.alone.mean)}
    texts = []
    for key in _PROBED:
        found = {arm: (probe["recipes"].get(arm, {}).get(key) or {}).get("mean") for arm in gaps}
        pairs = [(mean, gaps[arm]) for arm, mean in found.items() if mean is not None]
        value = rank_correlation(*zip(*pairs, strict=True)) if len(pairs) > 2 else math.nan
        texts.append("-" if math.isnan(value) else f"{value:+.2f} ({len(pairs)})")
    return [f"Spearman with the gaps at rung {rung} (arms)", *texts]


def facts(rows: Sequence[Row]) -> list[str]:
    """Sentences on the runs: their number, the seeds of each arm, and those that diverged."""
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
    rows: Sequence[Row], results: Sequence[Verdict], parameters: int, probe: Mapping[str, Any] | None
) -> Markup:
    """The sections that a measured experiment adds to a page: gaps over its rungs, and the probe.

    Args:
        rows: The results of runs, including the reference's.
        results: The results of the arms.
        parameters: Parameters in linear layers, to which tokens are related.
        probe: The figures of `narrowgauge probe` for each arm's recipe; None without them.
    """
    svg = Markup(rungs_svg(results, parameters, rows[0].arm)) if results else ""
    probed = None if probe is None else Table("The probe", *probe_table(probe, results), TEXT_COLUMNS)
    return part("rungs", " ".join(facts(rows)), svg, probed)
