"""Pictures of results as SVG: curves, bars and maps. No request leaves the page that holds one."""

import math
from collections.abc import Mapping, Sequence

from narrowgauge.forecast.svg import COLORS, INK, Axis, Drawing

_WIDTH, _LEFT, _RIGHT, _TOP = 720.0, 64.0, 150.0, 34.0
Points = Sequence[tuple[float, float]]


def curves(series: Mapping[str, Points], title: str, x_name: str, y_name: str) -> str:
    """Curves over a common axis, each with its name beside them; values that are not finite are left out."""
    drawn = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in series.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    xs, ys = ([p[axis] for points in drawn.values() for p in points] or [0.0, 1.0] for axis in (0, 1))
    drawing = Drawing(_WIDTH, 380, title)
    x, y = _axis(xs, _LEFT, _WIDTH - _RIGHT), _axis(ys, 336, _TOP)
    drawing.up(x, y, {value: f"{value:.4g}" for value in y.ticks(5)})
    drawing.across(x, y.start, {value: f"{value:.4g}" for value in x.ticks(5)}, x_name)
    for number, (name, points) in enumerate(drawn.items()):
        color = COLORS[number % len(COLORS)]
        drawing.line([x(a) for a, _ in points], [y(b) for _, b in points], color, 1.6)
        drawing.text(x.end + 8, _TOP + 10 + 18 * number, name, fill=color)
    drawing.text(_LEFT, _TOP - 14, f"{title}; {y_name}")
    return str(drawing)


def bars(
    values: Mapping[str, tuple[float, float, float]], title: str, digits: str = ".3g", unit: str = ""
) -> str:
    """A bar for each value, (mean, low, high), with its interval; equal ends have none."""
    finite = [v for v in values.values() if math.isfinite(v[0])]
    x = _axis([0.0, *(end for v in finite for end in v if math.isfinite(end))], 170, _WIDTH - 90)
    drawing = Drawing(_WIDTH, _TOP + 26.0 * len(values) + 20, title)
    drawing.text(12, _TOP - 14, title)
    for number, (name, (mean, low, high)) in enumerate(values.items()):
        y = _TOP + 26.0 * number
        drawing.text(x.start - 8, y + 14, name, "end")
        if not math.isfinite(mean):
            drawing.text(x.start + 6, y + 14, "not finite")
            continue
        left, right = sorted((x(0.0), x(mean)))
        drawing.rect(left, y + 3, right - left, 15, COLORS[0])
        if low < high and math.isfinite(low) and math.isfinite(high):
            drawing.line((x(low), x(high)), (y + 10, y + 10), INK, 1.5)
        at = max(right, x(high) if math.isfinite(high) else right)
        drawing.text(at + 6, y + 14, f"{mean:{digits}}{unit}")
    return str(drawing)


def heat(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Mapping[tuple[str, str], float],
    title: str,
    digits: str,
) -> str:
    """A map of rows and columns: the darker, the larger; missing values stay empty."""
    shade = _axis([v for v in values.values() if math.isfinite(v)] or [0.0], 0, 1)
    left, cell = 190.0, 66.0
    drawing = Drawing(left + cell * len(columns) + 10, _TOP + 40 + 20.0 * len(rows), title)
    drawing.text(12, _TOP - 14, title)
    for j, column in enumerate(columns):
        drawing.text(left + cell * (j + 0.5), _TOP + 10, column, "middle")
    for i, row in enumerate(rows):
        y = _TOP + 18.0 + 20.0 * i
        drawing.text(left - 8, y + 14, row, "end")
        for j, column in enumerate(columns):
            value = values.get((row, column), math.nan)
            if math.isfinite(value):
                share = shade(value)
                drawing.rect(left + cell * j, y, cell - 2, 18, COLORS[0], fill_opacity=0.08 + 0.92 * share)
                ink = "white" if share > 0.6 else INK
                drawing.text(left + cell * (j + 0.5), y + 13, f"{value:{digits}}", "middle", fill=ink)
    return str(drawing)


def _axis(values: Sequence[float], start: float, end: float) -> Axis:
    low, high = min(values), max(values)
    return Axis(low, high if high > low else low + 1.0, start, end)
