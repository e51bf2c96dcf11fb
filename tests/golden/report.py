"""One line at the end of a run of pytest: how many golden digits were compared, and whether exactly.

`test_golden.py` records it as a property of each test, which comes from other processes of pytest as well.
"""

from collections import Counter

import pytest

_compared: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        _compared.update(str(how) for name, how in report.user_properties if name == "golden")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for how, count in _compared.items():
        terminalreporter.write_line(f"golden: {count} {how}")
