"""Pictures of results as SVG: curves, bars and maps. They need no library, and no request leaves the page."""

import math
from collections.abc import Mapping, Sequence
from html import escape

_COLORS = ("#0b6e99", "#c4511d", "#2e7d32", "#7b3fa0", "#b8860b", "#a02050", "#4a5a6a", "#008080")
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 720.0, 64.0, 150.0, 34.0, 44.0
Points = Sequence[tuple[float, float]]


def curves(series: Mapping[str, Points], title: str, x_name: str, y_name: str) -> str:
    """Curves over a common axis, each with its name at its end; values that are not finite are left out."""
    drawn = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in series.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    xs, ys = ([p[axis] for points in drawn.values() for p in points] or [0.0, 1.0] for axis in (0, 1))
    height = 380.0
    x_of, y_of = _scale(xs, _LEFT, _WIDTH - _RIGHT), _scale(ys, height - _BOTTOM, _TOP)
    marks = [_text(x, height - _BOTTOM + 18, f"{v:.4g}", "middle") for v, x in x_of.ticks]
    marks += [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        + _text(_LEFT - 6, y + 4, f"{v:.4g}", "end")
        for v, y in y_of.ticks
    ]
    for number, (name, points) in enumerate(drawn.items()):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        marks.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        marks.append(_text(_WIDTH - _RIGHT + 8, _TOP + 10 + 18 * number, name, "start", color))
    marks.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, height - 8, x_name, "middle"))
    marks.append(_text(_LEFT, _TOP - 14, f"{title}; {y_name}", "start"))
    return _svg(marks, height)


def bars(
    values: Mapping[str, tuple[float, float, float]], title: str, digits: str = ".3g", unit: str = ""
) -> str:
    """A bar for each value, (mean, low, high), with its interval; equal ends have none."""
    finite = {name: v for name, v in values.items() if math.isfinite(v[0])}
    ends = [0.0, *(x for v in finite.values() for x in v if math.isfinite(x))]
    left = 170.0
    x_of = _scale(ends, left, _WIDTH - 90.0)
    height = _TOP + 26.0 * len(values) + 20.0
    marks = [_text(12, _TOP - 14, title, "start")]
    for number, (name, (mean, low, high)) in enumerate(values.items()):
        y = _TOP + 26.0 * number
        marks.append(_text(left - 8, y + 14, name, "end"))
        if not math.isfinite(mean):
            marks.append(_text(left + 6, y + 14, "not finite", "start"))
            continue
        start, end = sorted((x_of(0.0), x_of(mean)))
        marks.append(
            f'<rect x="{start:.1f}" y="{y + 3:.1f}" width="{end - start:.1f}" height="15" fill="#0b6e99"/>'
        )
        if low < high and math.isfinite(low) and math.isfinite(high):
            marks.append(
                f'<line x1="{x_of(low):.1f}" x2="{x_of(high):.1f}" y1="{y + 10:.1f}" y2="{y + 10:.1f}" '
                'stroke="#222" stroke-width="1.5"/>'
            )
        at = max(end, x_of(high) if math.isfinite(high) else end)
        marks.append(_text(at + 6, y + 14, f"{mean:{digits}}{unit}", "start"))
    return _svg(marks, height)


def heat(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Mapping[tuple[str, str], float],
    title: str,
    digits: str,
) -> str:
    """A map of rows and columns: the darker, the larger; missing values stay empty."""
    found = [v for v in values.values() if math.isfinite(v)]
    low, high = min(found, default=0.0), max(found, default=1.0)
    left, cell = 190.0, 66.0
    height, width = _TOP + 40.0 + 20.0 * len(rows), left + cell * len(columns) + 10.0
    marks = [_text(12, _TOP - 14, title, "start")]
    marks += [_text(left + cell * (j + 0.5), _TOP + 10, column, "middle") for j, column in enumerate(columns)]
    for i, row in enumerate(rows):
        y = _TOP + 18.0 + 20.0 * i
        marks.append(_text(left - 8, y + 14, row, "end"))
        for j, column in enumerate(columns):
            value = values.get((row, column), math.nan)
            if math.isfinite(value):
                share = (value - low) / (high - low) if high > low else 0.5
                ink = "#fff" if share > 0.6 else "#111"
                marks.append(
                    f'<rect x="{left + cell * j:.1f}" y="{y:.1f}" width="{cell - 2:.1f}" height="18" '
                    f'fill="#0b6e99" fill-opacity="{0.08 + 0.92 * share:.2f}"/>'
                    + _text(left + cell * (j + 0.5), y + 13, f"{value:{digits}}", "middle", ink)
                )
    return _svg(marks, height, width)


class _scale:
    """A linear map from values to positions, with four ticks."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        self.low, self.span = low, (high - low) or 1.0
        self.start, self.end = start, end
        self.ticks = [(v, self(v)) for v in (low + self.span * share for share in (0.0, 1 / 3, 2 / 3, 1.0))]

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / self.span * (self.end - self.start)


def _text(x: float, y: float, text: str, anchor: str, color: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'


def _svg(marks: Sequence[str], height: float, width: float = _WIDTH) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(marks)}</svg>"
    )
