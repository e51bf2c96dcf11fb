"""What happened? Run directories read back, compared as words, and drawn on one HTML page."""

from narrowgauge.report.page import render_report, write_report
from narrowgauge.report.runs import Run, Step, Validation, read_run, read_runs
from narrowgauge.report.table import comparison_notes, comparison_rows, print_comparison

__all__ = [
    "Run",
    "Step",
    "Validation",
    "comparison_notes",
    "comparison_rows",
    "print_comparison",
    "read_run",
    "read_runs",
    "render_report",
    "write_report",
]
