"""Processor seconds of tests, children counted: a limit for each quick case, and a sum for each folder.

A process that a test starts costs as much as the test itself, wherever its seconds are booked: those that
have ended are in the counts of whoever waited for them, those that live on (the warm server) in their own.
So a test costs what the whole tree of processes has used after it less what it had used before.

A busy or slow machine makes every second longer. A fixed piece of work, timed at the start, tells by how
much, and limits are multiplied by that. The first case in a process also pays for what is made once, such as
imports and the warm server, so a case above its limit runs again, at most twice, and its last run counts. As
other programs make it costlier still, it fails beyond `NOISE` times the limit.
The limits are in `budgets.toml`: `case` for one quick case, and the sums of folders of both tiers of CI,
which the end of a complete run compares and prints.
"""

import math
import os
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

TESTS = Path(__file__).parents[1]
TICK = 1 / os.sysconf("SC_CLK_TCK")
PACE_S = 0.041  # of the fixed work where the limits were set: two cores of an AMD EPYC, November 2026
LATER = ("thorough", "nightly")
WORTH_TELLING_S = 30
NOISE = 2.0


def limits() -> dict[str, Any]:
    """Seconds a case, and by tier and folder."""
    return dict(tomllib.loads((TESTS / "budgets.toml").read_text(encoding="utf-8"))["seconds"])


def used() -> float:
    """Processor seconds of this process, of all that it started, and of all that those started."""
    waiting, total = _children("self"), time.process_time() + sum(os.times()[2:4])
    while waiting:
        pid = waiting.pop()
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            waiting += _children(pid)
        except OSError:  # it has ended
            continue
        total += TICK * sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return total


def _children(pid: str) -> list[str]:
    found: list[str] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += task.read_text(encoding="utf-8").split()
        except OSError:
            continue
    return found


def pace() -> float:
    """How many times as long as where the limits were set a piece of work takes here; at least 1."""
    began = time.process_time()
    sum(i * i for i in range(10**6))
    return max(1.0, (time.process_time() - began) / PACE_S)


class Cost:
    """The plugin: books each phase of a test, and adds up what all processes book."""

    def __init__(self) -> None:
        self.pace = pace()
        self.case = limits()["case"]
        self.before = used()
        self.sums: Counter[tuple[str, str]] = Counter()
        self.costly: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Write the seconds of a phase into its report; fail a quick case above the limit."""
        report = yield
        now = used()
        if now < self.before:  # a process that was just ending was in neither count: look again
            now = max(now, used())
        seconds, self.before = max(0.0, now - self.before), now
        tier = next((mark.name for mark in item.iter_markers() if mark.name in LATER), "quick")
        report.cost = (tier, seconds)
        return report

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a test; a quick case that is above the limit in its last run as well fails."""
        where = {"nodeid": item.nodeid, "location": item.location}
        item.ihook.pytest_runtest_logstart(**where)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        for _ in range(2):
            if self._costly(reports):
                reports = runtestprotocol(item, log=False, nextitem=nextitem)
        for report in self._costly(reports):
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {report.cost[1]:.2f} processor seconds, and a quick case has "
                f'{self.case}; shorten it, or mark it @pytest.mark.tier("thorough")'
            )
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(**where)
        return True

    def _costly(self, reports: list[Any]) -> list[Any]:
        """The report of a quick case that is above its limit, however slow the machine is now."""
        called = [r for r in reports if r.when == "call" and r.passed and r.cost[0] == "quick"]
        most = NOISE * self.case
        return [r for r in called if r.cost[1] > most and r.cost[1] > most * pace()]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add up the seconds by tier and folder; with several processes the first one hears of all."""
        if hasattr(report, "cost"):
            tier, seconds = report.cost
            path = report.nodeid.partition("::")[0].split("/")
            folder = path[1] if len(path) > 2 else "root"
            self.sums[tier, folder] += seconds
            self.costly[report.nodeid] += seconds * (report.when == "call")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a complete run in which a folder is above its sum."""
        is_complete = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
        if is_complete and not hasattr(session.config, "workerinput") and self._above():
            session.exitstatus = max(session.exitstatus, pytest.ExitCode.TESTS_FAILED)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the sums, and the costliest cases without their fixtures."""
        if sum(self.sums.values()) < WORTH_TELLING_S:
            return
        terminalreporter.section("processor seconds")
        for (tier, folder), seconds in sorted(self.sums.items()):
            terminalreporter.write_line(f"{seconds:8.0f} {tier} {folder}")
        for name, seconds in self.costly.most_common(15):
            terminalreporter.write_line(f"{seconds:8.1f} {name}")
        for line in self._above():
            terminalreporter.write_line(f"above its budget in tests/budgets.toml: {line}")

    def _above(self) -> list[str]:
        """The folders above their sums, as sentences."""
        budget = limits()
        return [
            f"{tier} {folder} took {seconds:.0f} of {most:.0f} processor seconds"
            for (tier, folder), seconds in sorted(self.sums.items())
            if seconds > (most := budget.get(tier, {}).get(folder, math.inf) * self.pace)
        ]


def pytest_configure(config: pytest.Config) -> None:
    """Watch the costs where the operating system tells them."""
    if Path("/proc/self/task").exists():
        config.pluginmanager.register(Cost(), "cost")
