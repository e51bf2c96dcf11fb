"""Reads run directories, compares runs in tables, and draws them on one HTML page."""

from typing import TYPE_CHECKING

from narrowgauge.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.report.page.page import render_report as render_report
    from narrowgauge.report.page.page import write_report as write_report
    from narrowgauge.report.read.progress import Progress as Progress
    from narrowgauge.report.read.progress import list_runs as list_runs
    from narrowgauge.report.read.run import Run as Run
    from narrowgauge.report.read.run import read_run as read_run
    from narrowgauge.report.read.run import read_runs as read_runs
    from narrowgauge.report.read.steps import Step as Step
    from narrowgauge.report.read.steps import Validation as Validation
    from narrowgauge.report.table.notes import print_comparison as print_comparison
    from narrowgauge.report.table.notes import table_notes as table_notes
    from narrowgauge.report.table.sentence import summary as summary
    from narrowgauge.report.table.table import table_rows as table_rows
    from narrowgauge.report.verdict.verdict import Verdict as Verdict
    from narrowgauge.report.verdict.verdict import verdicts as verdicts
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)
