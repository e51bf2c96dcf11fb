"""What happened? Reads run directories, compares runs as tables, and draws them on one HTML page."""

from narrowgauge.report.page.page import render_report, write_report
from narrowgauge.report.read.listing import RunSummary, list_runs
from narrowgauge.report.read.run import Run, read_run, read_runs
from narrowgauge.report.read.steps import Step, Validation
from narrowgauge.report.table.notes import print_comparison, table_notes
from narrowgauge.report.table.sentence import summary
from narrowgauge.report.table.table import table_rows
from narrowgauge.report.verdict.verdict import Verdict, verdicts

__all__ = [
    "Run",
    "RunSummary",
    "Step",
    "Validation",
    "Verdict",
    "list_runs",
    "print_comparison",
    "read_run",
    "read_runs",
    "render_report",
    "summary",
    "table_notes",
    "table_rows",
    "verdicts",
    "write_report",
]
