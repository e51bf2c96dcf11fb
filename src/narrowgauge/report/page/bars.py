"""Stacked bars as plain HTML: they need no script, and a part says its value under the pointer or the focus.

A part is told by its colour, its hatching and, where there is room, its name; beneath the bars stands a key,
and whoever calls puts the numbers in a table below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

HATCHES = 8  # of page.css
_ROOM = 1.1  # percent of a bar's length that a letter needs


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        name: at its head.
        parts: sizes by class, in the order in which they are stacked; none is negative.
        total: in words, at its end.
        mark: a size to be marked with a line, such as a limit; None for none.
    """

    name: str
    parts: Mapping[str, float]
    total: str
    mark: float | None = None


def bars(rows: Sequence[Bar], words: Mapping[str, Sequence[str]], label: str) -> str:
    """Bars under each other on one scale, with their key.

    Args:
        rows: the bars.
        words: by class, in the order of the key, the size in each bar for people.
        label: what the bars show.
    """
    longest = max([sum(row.parts.values()) for row in rows] + [row.mark or 0.0 for row in rows]) or 1.0
    number = {name: i % HATCHES for i, name in enumerate(words)}
    told = [name for name in words if any(row.parts.get(name, 0) > 0 for row in rows)]
    key = "".join(f'<span><i class="part hatch{number[name]}"></i>{escape(name)}</span>' for name in told)
    drawn = "".join(_bar(row, i, longest, number, words) for i, row in enumerate(rows))
    key = f'<p class="keys muted">{key}</p>'
    return f'<div class="bars" role="group" aria-label="{escape(label)}">{drawn}{key}</div>'


def numbers(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], label: str) -> str:
    """The table below: a column for each bar, a row (class, cells) for each part."""
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
    row: Bar, i: int, longest: float, number: Mapping[str, int], words: Mapping[str, Sequence[str]]
) -> str:
    parts = []
    for name, size in row.parts.items():
        share = 100 * size / longest
        if share <= 0:
            continue
        says = escape(f"{row.name}, {name}: {words[name][i]}")
        inside = f"<b>{escape(name)}</b>" if share > _ROOM * len(name) else ""
        parts.append(
            f'<span class="part hatch{number[name]}" style="width:{share:.3f}%" tabindex="0" role="img" '
            f'aria-label="{says}" data-says="{says}">{inside}</span>'
        )
    mark = "" if row.mark is None else f'<i class="mark" style="left:{100 * row.mark / longest:.3f}%"></i>'
    return (
        f'<div class="bar-head"><span>{escape(row.name)}</span>'
        f'<span class="muted">{escape(row.total)}</span></div>'
        f'<div class="bar">{"".join(parts)}{mark}</div>'
    )
