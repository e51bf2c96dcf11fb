"""Pictures as SVG, for pages and notebooks: one palette, marks, and axes with round ticks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#0b6e99", "#c4511d", "#2e7d32", "#7b3fa0", "#b8860b", "#a02050", "#4a5a6a", "#008080")
INK, ZERO, RULE, BAND = "#222", "#777", "#e4e4e4", "#eef1f3"


@dataclass(frozen=True, slots=True)
class Axis:
    """A map from values `low` .. `high` to positions `start` .. `end`, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """The position of a value; one beyond an end is placed at that end."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        share = math.log(at / low) / math.log(high / low) if self.is_log else (at - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 7) -> list[float]:
        """Round values between the ends: about `most` at equal distances, or 1, 2 and 5 of each decade."""
        if self.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
            return [value for value in found if self.low <= value <= self.high]
        least = (self.high - self.low) / most
        power = math.floor(math.log10(least))
        step = next(s for digit in (1, 2, 5, 10) if (s := digit * 10.0**power) >= least * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(n * step, 12) for n in range(first, last + 1)]


class Drawing:
    """Marks on a white ground; the later ones cover the earlier ones."""

    def __init__(self, width: float, height: float, label: str = "") -> None:
        """Begin a drawing of a size in pixels; `label` is its accessible name."""
        self._marks: list[str] = []
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" font-family="system-ui, sans-serif" font-size="12" role="img" '
            f'aria-label="{escape(label)}">'
        )
        self.add("rect", width=width, height=height, fill="white")

    def __str__(self) -> str:
        return "\n".join([self._head, *self._marks, "</svg>"]) + "\n"

    def add(self, tag: str, content: str = "", /, **attributes: float | str) -> None:
        """Add an element; `_` in a name stands for a hyphen."""
        shown = (
            f' {name.replace("_", "-")}="{escape(value) if isinstance(value, str) else f"{value:.6g}"}"'
            for name, value in attributes.items()
        )
        self._marks.append(f"<{tag}{''.join(shown)}>{escape(content)}</{tag}>")

    def text(self, x: float, y: float, text: str, anchor: str = "start", **more: float | str) -> None:
        """Add a text that starts, has its middle or ends at a position."""
        self.add("text", text, x=round(x, 1), y=round(y, 1), text_anchor=anchor, **({"fill": INK} | more))

    def rect(self, x: float, y: float, width: float, height: float, color: str, **more: float | str) -> None:
        """Add a rectangle."""
        place = {"x": round(x, 1), "y": round(y, 1), "width": round(width, 1), "height": round(height, 1)}
        self.add("rect", fill=color, **place, **more)

    def line(self, x: Iterable[float], y: Iterable[float], color: str = RULE, width: float = 1) -> None:
        """Add a line through points."""
        self.add("polyline", points=_points(x, y), fill="none", stroke=color, stroke_width=width)

    def area(self, x: Sequence[float], low: Sequence[float], high: Sequence[float], color: str) -> None:
        """Add the area between two lines over the same positions, nearly transparent."""
        around = _points([*x, *reversed(x)], [*high, *reversed(low)])
        self.add("polygon", points=around, fill=color, fill_opacity=0.1)

    def dot(self, x: float, y: float, radius: float, color: str, is_hollow: bool = False) -> None:
        """Add a dot, or a ring."""
        fill = "none" if is_hollow else color
        self.add("circle", cx=round(x, 1), cy=round(y, 1), r=radius, fill=fill, stroke=color)

    def across(self, x: Axis, at: float, ticks: dict[float, str], name: str) -> None:
        """Add texts at values along the lower edge, and the name of the axis below them."""
        for value, text in ticks.items():
            self.text(x(value), at + 18, text, "middle")
        self.text((x.start + x.end) / 2, at + 38, name, "middle")

    def up(self, x: Axis, y: Axis, ticks: dict[float, str]) -> None:
        """Add a line across at each value, and its text before it."""
        for value, text in ticks.items():
            self.line((x.start, x.end), (y(value), y(value)), RULE if value else ZERO)
            self.text(x.start - 8, y(value) + 4, text, "end")


def _points(x: Iterable[float], y: Iterable[float]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
