"""The section of a page that compares measured gaps with their forecasts."""

from collections.abc import Sequence
from html import escape

from narrowgauge.report.page.plain_page import html_table
from narrowgauge.report.verdict.expected import Expectation


def expected_section(found: Sequence[Expectation]) -> str:
    """A section of the page; "" for nothing."""
    if not found:
        return ""
    head = ("run", "gap", "forecast", "90 %", "probability", "verdict")
    lines = []
    for one in found:
        interval = one.forecast.gap_percent
        shown = ("-", "-", "-")
        if interval is not None and one.probability is not None:
            ends = f"{interval.low:+.2f} to {interval.high:+.2f}"
            shown = (f"{interval.mean:+.2f} %", ends, f"{one.probability:.0%}")
        lines.append([one.name, f"{one.gap:+.2f} %", *shown, one.word])
    notes = "".join(f"<p>{escape(one.text)}</p>" for one in found if one.word != "inside")
    table = html_table(head, lines, ("run", "verdict"))
    return f'<section id="expected"><h2>Expected</h2>{table}{notes}</section>'
