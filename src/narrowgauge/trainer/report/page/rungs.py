"""The sections of an experiment at several lengths: gaps over tokens, a forest plot, the probe.

The same rows give the same bytes. A gap beyond 6 % is printed with an arrow, so that the others stay visible.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from markupsafe import Markup

from narrowgauge.forecast.svg import BAND, COLORS, RULE, ZERO, Axis, Drawing
from narrowgauge.trainer.analysis.rank_correlation import rank_correlation
from narrowgauge.trainer.report.page.html import part
from narrowgauge.trainer.report.page.measured import FIGURES, probe_table
from narrowgauge.trainer.report.read.stored import Probe
from narrowgauge.trainer.report.verdict.rule import MARGIN
from narrowgauge.trainer.report.verdict.verdict import DIVERGED, Row, Verdict

_LEFT, _TOP, _ROW = 64.0, 56.0, 22.0
_WIDTH, _CURVES, _GAP, _NAMES = 1080.0, 380.0, 56.0, 190.0
_LARGEST = 6.0  # percent; larger gaps are drawn as arrows


def rungs_svg(results: Sequence[Verdict], parameters: int, reference: str) -> str:
    """Both plots in one drawing; `parameters` is the count to which tokens are related."""
    last = max(result.rung for result in results)
    top = [result for result in results if result.rung == last]
    top.sort(key=lambda r: math.inf if math.isnan(r.individual.mean) else r.individual.mean)
    colors = {result.name: COLORS[i % len(COLORS)] for i, result in enumerate(top)}
    bottom = _TOP + max(len(top) * _ROW, 260.0)
    shown = [r.at_once for r in results if abs(r.individual.mean) <= _LARGEST]
    ends = [end for gap in shown for end in (gap.mean, gap.low, gap.high) if math.isfinite(end)]
    low = max(min([*ends, -2 * MARGIN]), -_LARGEST)
    high = min(max([*ends, 2 * MARGIN]), _LARGEST)
    pad = 0.04 * (high - low)
    drawing = Drawing(_WIDTH, bottom + 54, f"Gaps to {reference}")
    gaps = Axis(low - pad, high + pad, bottom, _TOP)
    drawing.text(_LEFT, 24, f"Gap to {reference} over tokens for each parameter", font_weight="bold")
    _draw_curves(drawing, results, parameters, colors, gaps)
    begin = _LEFT + _CURVES + _GAP + _NAMES
    _draw_forest(drawing, top, reference, colors, replace(gaps, start=begin, end=_WIDTH - 130), bottom)
    return str(drawing)


def _draw_curves(
    drawing: Drawing, results: Sequence[Verdict], parameters: int, colors: Mapping[str, str], y: Axis
) -> None:
    """The gap over tokens per parameter, a line for each arm."""
    ratios = sorted({result.tokens / parameters for result in results})
    x = Axis(ratios[0] / 1.25, ratios[-1] * 1.25, _LEFT, _LEFT + _CURVES, is_log=True)
    drawing.rect(x.start, y(MARGIN), _CURVES, y(-MARGIN) - y(MARGIN), BAND)
    drawing.up(x, y, {tick: f"{tick:+.1f} %" if tick else "0" for tick in y.ticks(9)})
    drawing.across(x, y.start, {ratio: f"{ratio:.1f}" for ratio in ratios}, "tokens for each parameter")
    for number, (arm, color) in enumerate(colors.items()):
        mine = [r for r in results if r.name == arm and abs(r.individual.mean) <= _LARGEST]
        mine.sort(key=lambda r: r.tokens)
        shift = 2.5 * (number - (len(colors) - 1) / 2)
        at = [x(r.tokens / parameters) + shift for r in mine]
        drawing.line(at, [y(r.individual.mean) for r in mine], color, 1.5)
        for px, r in zip(at, mine, strict=True):
            if math.isfinite(r.at_once.low):
                drawing.line((px, px), (y(r.at_once.low), y(r.at_once.high)), color)
            drawing.dot(px, y(r.individual.mean), 3, color)


def _draw_forest(
    drawing: Drawing, top: Sequence[Verdict], zero: str, colors: Mapping[str, str], x: Axis, bottom: float
) -> None:
    """The gap of each arm at the highest rung, with its interval and the verdict."""
    title = f"Gap at the highest rung (grey: within {MARGIN} %)"
    drawing.text(x.start - _NAMES, 24, title, font_weight="bold")
    drawing.rect(x(-MARGIN), _TOP - 8, x(MARGIN) - x(-MARGIN), bottom - _TOP + 8, BAND)
    ticks = x.ticks(most=6)  # horizontal labels take more room
    for tick in ticks:
        drawing.line((x(tick), x(tick)), (_TOP - 8, bottom), RULE if tick else ZERO)
    drawing.across(x, bottom, {tick: f"{tick:+.1f}" if tick else zero for tick in ticks}, "gap, %")
    for number, result in enumerate(top):
        y, color, gap = _TOP + _ROW * number + 8, colors[result.name], result.individual.mean
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


def agreement(probe: Probe, results: Sequence[Verdict], keys: Sequence[str]) -> list[list[str]]:
    """For each rung, Spearman's rank correlation of figures of the probe with the mean gaps, as texts.

    Three or more arms must have both. A good figure is near 1, or near -1 if less is worse.
    """
    lines = []
    for rung in sorted({one.rung for one in results}):
        gaps = {one.name: one.individual.mean for one in results if one.rung == rung and one.gaps}
        texts = []
        for key in keys:
            pairs = [(x, gap) for arm, gap in gaps.items() if (x := probe.mean(arm, key)) is not None]
            value = rank_correlation(*zip(*pairs, strict=True)) if len(pairs) > 2 else math.nan
            texts.append("-" if math.isnan(value) else f"{value:+.2f} ({len(pairs)})")
        lines.append([f"Spearman with the gaps at rung {rung} (arms)", *texts])
    return lines


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
    rows: Sequence[Row], results: Sequence[Verdict], parameters: int, probe: Probe | None
) -> Markup:
    """The sections that a measured experiment adds to a page: gaps over its rungs, and the probe.

    Tokens are related to the parameters in linear layers. The probe has each arm's recipe; None without it.
    """
    svg = Markup(rungs_svg(results, parameters, rows[0].arm)) if results else ""
    probed = probe and probe_table(probe, agreement(probe, results, [*FIGURES]))
    return part("rungs", " ".join(facts(rows)), svg, probed)
