"""The fault table, docs/faults.md: what may go wrong with a run, one row a case, and which tests prove it.

A test has the mark `@case("A2")`, wherever it is. `make faults` runs the full table and writes its results.
CI runs the cases of the tiers quick and thorough, at least one of each row; the default is "nightly". A row
passes when all of its tests do. A new row begins on the page.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
#: The rows of the page: their names, and what goes wrong.
CASES = dict(re.findall(r"^\| ([A-G]\d) \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))


def case(*names: str, tier: str = "nightly") -> Callable[[Any], Any]:
    """Decorates a test (or a set of its parameters, as `marks`) that proves these rows, in a tier."""
    assert all(name in CASES for name in names), names

    def mark(test: Any) -> Any:
        test = pytest.mark.case(*names)(test)
        return test if tier == "quick" else pytest.mark.tier(tier)(test)

    return mark


# Those parameters of a test that wait for `make faults`.
LATER = pytest.mark.tier("nightly")
RANKS = pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=LATER)], ids=["1 rank", "2 ranks"])
