"""The result table of a run of pytest: each row of `support.fault_table`, whether it passed, and how long it
took.

`pytest -m case --fault-table=FILE` prints it, and keeps it in FILE.
"""

import platform
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

from support.fault_table import CASES, PAGE

#: Of each case: how a test of it ended, and why it was skipped; and the seconds of all.
_ends: dict[str, list[tuple[str, str]]] = defaultdict(list)
_seconds: Counter[str] = Counter()
_CASE = "case"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-table", metavar="FILE", help="print the table of faults, and write it to FILE")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:  # the properties come back from the workers of pytest-xdist, the marks do not
        item.user_properties += [(_CASE, name) for mark in item.iter_markers(_CASE) for name in mark.args]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name in (str(value) for key, value in report.user_properties if key == _CASE):
        _seconds[name] += report.duration
        if report.when == "call" or not report.passed:
            why = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
            _ends[name].append((report.outcome, why))


def _result(outcomes: set[str]) -> str:
    if "failed" in outcomes:
        return "FAIL"
    if "skipped" in outcomes:
        return "in part" if "passed" in outcomes else "skipped"
    return "pass" if outcomes else "no test"


def _table() -> str:
    lines = ["| case | fault | result | tests | seconds | |", "|---|---|---|---|---|---|"]
    counts: Counter[str] = Counter()
    for name, fault in CASES.items():
        outcomes = [outcome for outcome, _ in _ends[name]]
        notes = "; ".join(dict.fromkeys(why for outcome, why in _ends[name] if outcome == "skipped"))
        result, tests = _result(set(outcomes)), f"{outcomes.count('passed')}/{len(outcomes)}"
        lines.append(f"| {name} | {fault} | {result} | {tests} | {_seconds[name]:.0f} | {notes} |")
        counts[result] += 1
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
        head = PAGE.read_text(encoding="utf-8").partition("| case |")[0]
        Path(path).write_text(head + _table(), encoding="utf-8")
