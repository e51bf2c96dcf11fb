"""The picture of forecasts: gaps over tokens per parameter, their intervals and supporting points.

The curve of each recipe is the law at the size that was asked for; the band is its interval of 90 % for one
pair of runs. Points belong to the recipe itself, at any size; without any, to the nearest recipes, as
hollow rings.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from narrowgauge.forecast.forecast import Forecast, Forecaster

from narrowgauge.units import human_count

_COLORS = ("#0b6e99", "#c4511d", "#2e7d32", "#7b3fa0", "#b8860b", "#a02050", "#4a5a6a", "#008080")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760.0, 420.0, 56.0, 190.0, 40.0, 48.0
_STEPS = 40
Place = Callable[[float], float]


def picture(forecasts: Sequence["Forecast"], forecaster: "Forecaster") -> str:
    """The picture as SVG."""
    shown = [one for one in forecasts if one.predicted is not None and one.setting.parts]
    if not shown:
        return _svg(
            ['<text x="20" y="60">nothing is forecast: every recipe is a reference or refused</text>']
        )
    params, here = shown[0].params, shown[0].tokens / shown[0].params
    points = {one.recipe: _points(one, forecaster) for one in shown}
    lengths = [x for found in points.values() for x, _, _ in found] + [here]
    low, high = math.log(min(lengths) / 1.6), math.log(max(lengths) * 1.6)
    grid = np.exp(np.linspace(low, high, _STEPS))
    bands = {one.recipe: [_at(one, forecaster, x) for x in grid] for one in shown}
    top = max(
        hi for one in shown for _, _, hi in (_at(one, forecaster, here), *bands[one.recipe][:: _STEPS // 4])
    )
    top = min(top, 2.5 * max(mean for band in bands.values() for mean, _, _ in band))

    def x_of(length: float) -> float:
        return _LEFT + (math.log(length) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(gap: float) -> float:
        share = min(max(gap, 0.0), top) / top
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    marks = _axes(low, high, top, x_of, y_of)
    for number, one in enumerate(shown):
        color, band = _COLORS[number % len(_COLORS)], bands[one.recipe]
        upper = " ".join(f"{x_of(x):.1f},{y_of(hi):.1f}" for x, (_, _, hi) in zip(grid, band, strict=True))
        lower = [f"{x_of(x):.1f},{y_of(lo):.1f}" for x, (_, lo, _) in zip(grid, band, strict=True)]
        middle = " ".join(
            f"{x_of(x):.1f},{y_of(mean):.1f}" for x, (mean, _, _) in zip(grid, band, strict=True)
        )
        marks.append(
            f'<polygon points="{upper} {" ".join(reversed(lower))}" fill="{color}" fill-opacity="0.1"/>'
        )
        marks.append(f'<polyline points="{middle}" fill="none" stroke="{color}" stroke-width="2"/>')
        for x, gap, is_own in points[one.recipe]:
            fill = color if is_own else "none"
            marks.append(
                f'<circle cx="{x_of(x):.1f}" cy="{y_of(gap):.1f}" r="2.6" fill="{fill}" stroke="{color}" '
                'stroke-opacity="0.6" fill-opacity="0.6"/>'
            )
        assert one.predicted is not None
        marks.append(
            f'<circle cx="{x_of(here):.1f}" cy="{y_of(one.predicted.gap):.1f}" r="5" fill="{color}"/>'
        )
        y = _TOP + 14 + 20 * number
        marks.append(
            f'<rect x="{_WIDTH - _RIGHT + 14:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{color}"/>'
        )
        text = f"{one.recipe} {one.predicted.gap:+.2f} %"
        marks.append(f'<text x="{_WIDTH - _RIGHT + 30:.0f}" y="{y:.0f}">{escape(text)}</text>')
    title = (
        f"gap in percent of the loss, {human_count(params)} parameters; bands: 90 % of single pairs of runs"
    )
    marks.append(f'<text x="{_LEFT:.0f}" y="20" font-weight="bold">{escape(title)}</text>')
    return _svg(marks)


def _at(one: "Forecast", forecaster: "Forecaster", length: float) -> tuple[float, float, float]:
    predicted = forecaster.law.predict(one.setting.at(one.params, length * one.params))
    return predicted.gap, *predicted.interval()


def _points(one: "Forecast", forecaster: "Forecaster") -> list[tuple[float, float, bool]]:
    """Tokens per parameter and gap of each point, and whether it is of the recipe itself."""
    own = [o for o in forecaster.observed if o.setting.recipe == one.recipe]
    if own:
        return [(o.setting.tokens_per_param, o.gap, True) for o in own]
    return [(near.tokens / near.params, near.gap_percent, False) for near in one.nearest]


def _axes(low: float, high: float, top: float, x_of: Place, y_of: Place) -> list[str]:
    """Grid lines and their labels: powers of two or five of ten along, round percents up."""
    marks = []
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for power in range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1):
        for digit in (1, 2, 5):
            length = digit * 10.0**power
            if low <= math.log(length) <= high:
                x = x_of(length)
                marks.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#e4e4e4"/>')
                marks.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{length:g}</text>')
    step = next(s for s in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 1e9) if top / s <= 7)
    for number in range(int(top / step) + 1):
        y = y_of(number * step)
        marks.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number * step:g}</text>')
    middle = (_LEFT + right) / 2
    marks.append(
        f'<text x="{middle:.0f}" y="{_HEIGHT - 10}" text-anchor="middle">tokens per parameter</text>'
    )
    return marks


def _svg(marks: Sequence[str]) -> str:
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" '
            'font-family="system-ui, sans-serif" font-size="12" role="img" '
            'aria-label="forecast of the loss gap">',
            f'<rect width="{_WIDTH:.0f}" height="{_HEIGHT:.0f}" fill="white"/>',
            *marks,
            "</svg>\n",
        )
    )
