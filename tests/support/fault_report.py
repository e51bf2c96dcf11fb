"""The result table of a run of pytest: each row of `support.fault_table`, whether it passed, and how long it
took.

`pytest -m case --fault-table=FILE` prints it, and keeps it in FILE.
"""

import platform
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from support.fault_table import CASES

_HEAD = """\
# What may go wrong with a run, and does not

Every row is one or more tests with real processes, real signals and real files (`tests/faults/` and wherever
a test says `@case`). CI runs at least one test of each row; `make faults` runs them all and writes this page.
Ranks are processes that meet over gloo.
"""


@dataclass
class _Row:
    """What is known of a case so far."""

    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    skipped: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        if self.failed:
            return "FAIL"
        if self.skipped:
            return "in part" if self.passed else "skipped"
        return "pass" if self.passed else "no test"

    @property
    def tests(self) -> str:
        return f"{self.passed}/{self.passed + self.failed + len(self.skipped)}"

    @property
    def notes(self) -> str:
        return "; ".join(dict.fromkeys(self.skipped))


_rows: dict[str, _Row] = defaultdict(_Row)
_CASE = "case"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-table", metavar="FILE", help="print the table of faults, and write it to FILE")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:  # the properties come back from the workers of pytest-xdist, the marks do not
        item.user_properties += [(_CASE, name) for mark in item.iter_markers(_CASE) for name in mark.args]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name in (str(value) for key, value in report.user_properties if key == _CASE):
        row = _rows[name]
        row.seconds += report.duration
        if report.failed:
            row.failed += 1
        elif report.skipped:
            why = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
            row.skipped.append(why)
        elif report.when == "call":
            row.passed += 1


def _table() -> str:
    lines = ["| case | fault | result | tests | seconds | |", "|---|---|---|---|---|---|"]
    for name, fault in CASES.items():
        row = _rows[name]
        lines.append(f"| {name} | {fault} | {row.result} | {row.tests} | {row.seconds:.0f} | {row.notes} |")
    counts: dict[str, int] = defaultdict(int)
    for name in CASES:
        counts[_rows[name].result] += 1
    total = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
    where = f"{platform.machine()} {platform.system()}, torch {torch.__version__}"
    return "\n".join(lines) + f"\n\n{len(CASES)} cases: {total}. On {where}.\n"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("fault_table")
    if path is None:
        return
    terminalreporter.section("faults")
    terminalreporter.write(_table())
    if path:
        Path(path).write_text(f"{_HEAD}\n{_table()}", encoding="utf-8")
