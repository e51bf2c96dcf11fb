"""The sections of an experiment at several lengths: gaps over tokens, a forest plot, tables, the probe.

The same rows give the same bytes. A gap beyond 6 % is printed with an arrow, so that the others stay visible.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from markupsafe import Markup

from narrowgauge.analysis.rank_correlation import rank_correlation
from narrowgauge.report.page.html import Table, part
from narrowgauge.report.table.rungs import COLUMNS, cells
from narrowgauge.report.table.table import TEXT_COLUMNS
from narrowgauge.report.verdict.rule import MARGIN
from narrowgauge.report.verdict.rungs import DIVERGED, ArmResult, Row

_COLORS = ("#0b6e99", "#c4511d", "#2e7d32", "#7b3fa0", "#b8860b", "#a02050", "#4a5a6a", "#008080")
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


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear map from values `low` .. `high` to positions `start` .. `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The position of a value; a value beyond an end is placed at that end."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 9) -> list[float]:
        """Round values between the ends, at most `most` if a step of 2 allows it."""
        width = self.high - self.low
        step = next(s for s in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0) if width / s <= most or s == 2)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def rungs_svg(results: Sequence[ArmResult], parameters: int, reference: str) -> str:
    """Both plots in one drawing; `parameters` is the count to which tokens are related."""
    last = max(result.rung for result in results)
    top = [result for result in results if result.rung == last]
    top.sort(key=lambda r: math.inf if math.isnan(r.gap.mean) else r.gap.mean)
    colors = {result.arm: _COLORS[i % len(_COLORS)] for i, result in enumerate(top)}
    height = _TOP + max(len(top) * _ROW, 260.0) + 54
    bounds = _bounds(results)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img">',
        f'<rect width="{_WIDTH:.0f}" height="{height:.0f}" fill="white"/>',
        *_curves(results, parameters, reference, colors, bounds, height),
        *_forest(top, reference, colors, bounds, height),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _bounds(results: Sequence[ArmResult]) -> tuple[float, float]:
    """The range of gaps that both plots show."""
    shown = [r.at_once for r in results if abs(r.gap.mean) <= _LARGEST]
    ends = [x for gap in shown for x in (gap.mean, gap.low, gap.high) if math.isfinite(x)]
    low = max(min([*ends, -2 * MARGIN]), -_LARGEST)
    high = min(max([*ends, 2 * MARGIN]), _LARGEST)
    pad = 0.04 * (high - low)
    return low - pad, high + pad


def _curves(
    results: Sequence[ArmResult],
    parameters: int,
    reference: str,
    colors: dict[str, str],
    bounds: tuple[float, float],
    height: float,
) -> list[str]:
    """The gap over tokens per parameter, a line for each arm."""
    ratios = sorted({result.tokens / parameters for result in results})
    pad = 1.25
    x = Axis(math.log(ratios[0] / pad), math.log(ratios[-1] * pad), _LEFT, _LEFT + _CURVES)
    y = Axis(*bounds, height - 54, _TOP)
    parts = [_text(_LEFT, 24, f"Gap to {reference} over tokens for each parameter", weight="bold")]
    parts.append(_band(x.start, y(MARGIN), _CURVES, y(-MARGIN) - y(MARGIN)))
    for tick in y.ticks():
        parts.append(_line(x.start, y(tick), x.end, y(tick), "#777" if tick == 0 else "#e4e4e4"))
        parts.append(_text(x.start - 8, y(tick) + 4, f"{tick:+.1f} %" if tick else "0", anchor="end"))
    for ratio in ratios:
        parts.append(_text(x(math.log(ratio)), y.start + 18, f"{ratio:.1f}", anchor="middle"))
    parts.append(_text((x.start + x.end) / 2, y.start + 38, "tokens for each parameter", anchor="middle"))
    for number, (arm, color) in enumerate(colors.items()):
        mine = [r for r in results if r.arm == arm and abs(r.gap.mean) <= _LARGEST]
        mine.sort(key=lambda r: r.tokens)
        shift = 2.5 * (number - (len(colors) - 1) / 2)
        at = [(x(math.log(r.tokens / parameters)) + shift, r) for r in mine]
        points = " ".join(f"{px:.1f},{y(r.gap.mean):.1f}" for px, r in at)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        for px, r in at:
            if math.isfinite(r.at_once.low):
                parts.append(_line(px, y(r.at_once.low), px, y(r.at_once.high), color))
            parts.append(f'<circle cx="{px:.1f}" cy="{y(r.gap.mean):.1f}" r="3" fill="{color}"/>')
    return parts


def _forest(
    top: Sequence[ArmResult],
    reference: str,
    colors: dict[str, str],
    bounds: tuple[float, float],
    height: float,
) -> list[str]:
    """The gap of each arm at the highest rung, with its interval and the verdict."""
    begin = _LEFT + _CURVES + _GAP + _NAMES
    x = Axis(*bounds, begin, _WIDTH - 130)
    bottom = height - 54
    parts = [_text(begin - _NAMES, 24, f"Gap at the highest rung (grey: within {MARGIN} %)", weight="bold")]
    parts.append(_band(x(-MARGIN), _TOP - 8, x(MARGIN) - x(-MARGIN), bottom - _TOP + 8))
    for tick in x.ticks(most=6):  # horizontal labels take more room
        parts.append(_line(x(tick), _TOP - 8, x(tick), bottom, "#777" if tick == 0 else "#e4e4e4"))
        parts.append(_text(x(tick), bottom + 18, f"{tick:+.1f}" if tick else reference, anchor="middle"))
    parts.append(_text((x.start + x.end) / 2, bottom + 38, "gap, %", anchor="middle"))
    for number, result in enumerate(top):
        cy, color = _TOP + _ROW * number + 8, colors[result.arm]
        parts.append(_text(begin - 10, cy + 4, result.arm, anchor="end", color=color))
        parts.append(_text(_WIDTH - 122, cy + 4, result.verdict))
        if not result.gaps:
            continue
        if math.isfinite(result.at_once.low) and abs(result.gap.mean) <= _LARGEST:
            parts.append(_line(x(result.at_once.low), cy, x(result.at_once.high), cy, color, 2))
        if abs(result.gap.mean) > _LARGEST:
            beyond = f"{result.gap.mean:+.1f} %"
            if result.gap.mean > 0:
                parts.append(_text(x.end, cy + 4, f"{beyond} →", anchor="end", color=color))
            else:
                parts.append(_text(x.start, cy + 4, f"← {beyond}", color=color))
        else:
            px = x(result.gap.mean)
            parts.append(f'<circle cx="{px:.1f}" cy="{cy:.1f}" r="3.5" fill="{color}"/>')
    return parts


def _band(x: float, y: float, width: float, height: float) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="#eef1f3"/>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="{width}"/>'


def _text(
    x: float, y: float, text: str, anchor: str = "start", weight: str = "normal", color: str = "#222"
) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{color}"'
    return f"<text {where}>{escape(text)}</text>"


def rung_table(results: Sequence[ArmResult]) -> Lines:
    """Every arm at every rung."""
    order = list(dict.fromkeys(result.arm for result in results))
    return COLUMNS, [cells(r) for r in sorted(results, key=lambda r: (order.index(r.arm), r.rung))]


def probe_table(probe: Mapping[str, Any], results: Sequence[ArmResult] = ()) -> Lines:
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
    rows: Sequence[Row], results: Sequence[ArmResult], parameters: int, probe: Mapping[str, Any] | None
) -> Markup:
    """The sections that a measured experiment adds to a page: gaps over its rungs, and the probe.

    Args:
        rows: The results of runs, including the reference's.
        results: The results of the arms.
        parameters: Parameters in linear layers, to which tokens are related.
        probe: The figures of `narrowgauge probe` for each arm's recipe; None without them.
    """
    svg = [Markup(rungs_svg(results, parameters, rows[0].arm))] if results else []
    tables = [
        None if found is None else Table(label, *found, TEXT_COLUMNS)
        for label, found in (
            ("Every rung", rung_table(results) if results else None),
            ("The probe", None if probe is None else probe_table(probe, results)),
        )
    ]
    return part("rungs", " ".join(facts(rows)), svg, *tables)
