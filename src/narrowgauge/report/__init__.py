"""What happened? Reads run directories, compares runs as tables, and draws them on one HTML page."""

from narrowgauge.report.compare.table import comparison_notes, comparison_rows, print_comparison
from narrowgauge.report.compare.verdict import Verdict, print_verdicts, verdicts
from narrowgauge.report.page.page import render_report, write_report
from narrowgauge.report.read.listing import RunSummary, list_runs
from narrowgauge.report.read.run import Run, Step, Validation, read_run, read_runs

__all__ = [
    "Run",
    "RunSummary",
    "Step",
    "Validation",
    "Verdict",
    "comparison_notes",
    "comparison_rows",
    "list_runs",
    "print_comparison",
    "print_verdicts",
    "read_run",
    "read_runs",
    "render_report",
    "verdicts",
    "write_report",
]
