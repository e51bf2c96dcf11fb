"""The tables of experiments/forks.py: made from its rows alone, as its page has them."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_tables_of_the_rows():
    tables = runpy.run_path(str(ROOT / "experiments" / "forks.py"))["tables"]()
    page = (ROOT / "docs" / "which-number-hurts.md").read_text(encoding="utf-8")
    for name in ("recipes", "differences", "planted", "coverage", "sum"):
        assert tables[name] in page, name
