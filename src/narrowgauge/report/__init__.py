"""What happened? Run directories read back, compared as words, and drawn on one HTML page."""

from narrowgauge.report.page import render_report, write_report
from narrowgauge.report.runs import Run, Step, Validation, read_run, read_runs
from narrowgauge.report.table import comparison_notes, comparison_rows, print_comparison
from narrowgauge.report.verdict import Verdict, print_verdicts, verdicts

__all__ = [
    "Run",
    "Step",
    "Validation",
    "Verdict",
    "comparison_notes",
    "comparison_rows",
    "print_comparison",
    "print_verdicts",
    "read_run",
    "read_runs",
    "render_report",
    "verdicts",
    "write_report",
]
