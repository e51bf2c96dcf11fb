"""The page of a ladder."""

from collections.abc import Sequence

from narrowgauge.report.ladder.results import Row


def render_page(rows: Sequence[Row], parameters: int) -> str:
    """The page."""
    return f"{len(rows)} rows, {parameters} parameters"
