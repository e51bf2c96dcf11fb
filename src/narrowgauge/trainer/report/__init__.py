"""Reads run directories, compares runs in tables, and draws them on one HTML page."""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.trainer.report.page.page import render_report as render_report
    from narrowgauge.trainer.report.page.page import write_report as write_report
    from narrowgauge.trainer.report.read.records import Step as Step
    from narrowgauge.trainer.report.read.records import Validation as Validation
    from narrowgauge.trainer.report.read.run import Run as Run
    from narrowgauge.trainer.report.read.run import as_json as as_json
    from narrowgauge.trainer.report.read.run import list_runs as list_runs
    from narrowgauge.trainer.report.read.run import read_run as read_run
    from narrowgauge.trainer.report.read.run import read_runs as read_runs
    from narrowgauge.trainer.report.table import print_comparison as print_comparison
    from narrowgauge.trainer.report.table import summary as summary
    from narrowgauge.trainer.report.table import table_notes as table_notes
    from narrowgauge.trainer.report.table import table_rows as table_rows
    from narrowgauge.trainer.report.verdict.verdict import Verdict as Verdict
    from narrowgauge.trainer.report.verdict.verdict import verdicts as verdicts
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)
