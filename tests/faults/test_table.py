"""The table of faults: CI runs at least one test of each row."""

import re
from pathlib import Path

from support.fault_table import CASES

TESTS = Path(__file__).parents[1]
CASE = re.compile(r'\bcase\(((?:"[A-G]\d", )+)tier="(?:quick|thorough)"\)')


def test_each_row_has_a_test_in_a_tier_that_ci_runs():
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("test_*.py")))
    rows = {row for match in CASE.finditer(text) for row in re.findall(r"[A-G]\d", match[1])}
    assert rows == set(CASES)
