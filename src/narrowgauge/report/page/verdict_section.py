"""The verdicts on the page: one row for each variant, and what to know before believing them."""

from collections.abc import Sequence
from html import escape

from narrowgauge.report.compare.verdict import verdict_notes, verdict_rows, verdicts
from narrowgauge.report.read.run import Run

WORDS = ("variant", "verdict", "arithmetic")  # the other columns are numbers, set to the right


def verdict_section(runs: Sequence[Run]) -> str:
    """A section as HTML; empty for a single run."""
    if len(runs) < 2:
        return ""
    found = verdicts(runs)
    rows = verdict_rows(found)
    head = "".join(f'<th scope="col"{_align(column)}>{escape(column)}</th>' for column in rows[0])
    body = "".join(_row(row) for row in rows)
    notes = "".join(f"<li>{escape(note)}</li>" for note in verdict_notes(found))
    return (
        '<section class="verdicts"><h2>Verdicts</h2>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Verdict on each variant"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<ul class="notes">{notes}</ul></section>'
    )


def _row(row: dict[str, str]) -> str:
    cells = "".join(
        f"<td{_align(column)}>{escape(value)}</td>" for column, value in row.items() if column != "variant"
    )
    return f'<tr><th scope="row">{escape(row["variant"])}</th>{cells}</tr>'


def _align(column: str) -> str:
    return "" if column in WORDS else ' class="number"'
