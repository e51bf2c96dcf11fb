"""Stacked bars as plain HTML, without a script; each part shows its value on hover or focus.

A part is distinguished by its colour, its hatching and, if there is room, its name. A key follows the bars,
and the caller adds a table of the values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

HATCHES = 8  # patterns in page.css
_ROOM = 1.1  # percent of a bar's length for one letter


@dataclass(frozen=True)
class Bar:
    """One bar."""

    name: str  # the text at the head of the bar
    parts: Mapping[str, float]  # sizes by class, in stacking order; none is negative
    total: str  # the text at the end of the bar
    mark: float | None = None  # a size marked with a line, such as a limit


def bars(rows: Sequence[Bar], texts: Mapping[str, Sequence[str]], label: str) -> str:
    """HTML of bars below each other on one scale, with their key.

    `texts` has, for each class in the order of the key, its size in each bar; `label` is the accessible name.
    """
    longest = max([sum(row.parts.values()) for row in rows] + [row.mark or 0.0 for row in rows]) or 1.0
    number = {name: i % HATCHES for i, name in enumerate(texts)}
    shown = [name for name in texts if any(row.parts.get(name, 0) > 0 for row in rows)]
    key = "".join(f'<span><i class="part hatch{number[name]}"></i>{escape(name)}</span>' for name in shown)
    drawn = "".join(_bar(row, i, longest, number, texts) for i, row in enumerate(rows))
    key = f'<p class="keys muted">{key}</p>'
    return f'<div class="bars" role="group" aria-label="{escape(label)}">{drawn}{key}</div>'


def numbers(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], label: str) -> str:
    """The table of the values: a column for each bar, a row (class, cells) for each class."""
    head = "".join(f'<th scope="col" class="number">{escape(name)}</th>' for name in names)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for name, cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<table><thead><tr><th scope="col">class</th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _bar(
    row: Bar, i: int, longest: float, number: Mapping[str, int], texts: Mapping[str, Sequence[str]]
) -> str:
    parts = []
    for name, size in row.parts.items():
        share = 100 * size / longest
        if share <= 0:
            continue
        text = escape(f"{row.name}, {name}: {texts[name][i]}")
        inside = f"<b>{escape(name)}</b>" if share > _ROOM * len(name) else ""
        parts.append(
            f'<span class="part hatch{number[name]}" style="width:{share:.3f}%" tabindex="0" role="img" '
            f'aria-label="{text}" data-text="{text}">{inside}</span>'
        )
    mark = "" if row.mark is None else f'<i class="mark" style="left:{100 * row.mark / longest:.3f}%"></i>'
    return (
        f'<div class="bar-head"><span>{escape(row.name)}</span>'
        f'<span class="muted">{escape(row.total)}</span></div>'
        f'<div class="bar">{"".join(parts)}{mark}</div>'
    )
