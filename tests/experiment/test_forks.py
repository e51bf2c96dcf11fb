"""The tables of experiments/forks.py: made from its rows alone, as its page has them."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "which-number-hurts.md"


@pytest.fixture(scope="module")
def forks():
    return runpy.run_path(str(ROOT / "experiments" / "forks.py"))


def test_the_page_has_the_tables_of_the_rows(forks):
    page, tables = PAGE.read_text(encoding="utf-8"), forks["tables"]()
    for name in ("recipes", "differences", "planted", "coverage", "sum"):
        assert tables[name] in page, name


def test_seeds_that_not_all_changes_have_are_left_out(forks):
    assert forks["complete"]({"a": {1: 0.1, 2: 0.2}, "b": {2: 0.3}}) == {"a": {2: 0.2}, "b": {2: 0.3}}


def test_an_interval_that_is_off_does_not_cover(forks):
    """Four seeds of two places: the pairs of the second disagree by far more than their deviation."""
    gaps = {"a": {1: 0.0, 2: 1.0, 3: 0.0, 4: 1.0}, "b": {1: 0.0, 2: 1.0, 3: 100.0, 4: 101.0}}
    assert forks["coverage"](gaps) == "2 of 4"
