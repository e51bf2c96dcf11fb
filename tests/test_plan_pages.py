"""What pages show of plans is what their commands print, under any version of torch (`make pages`)."""

from pathlib import Path

import pytest

from support.markdown import blocks
from support.plan_pages import ROWS

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.tier("nightly", keep=1)  # plans of real models; `make pages` runs all
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{Path(row.page).stem} {row.options}")
def test_a_row_is_made_by_its_command(row):
    assert row.text() in (DOCS / row.page).read_text(encoding="utf-8").splitlines()


@pytest.mark.tier("nightly")  # plans of real models
@pytest.mark.parametrize("number", [0, 1])
def test_the_page_of_plans_shows_what_its_commands_print(number, narrowgauge):
    """Line breaks aside; `...` stands for what is left out."""
    page = (DOCS / "plan.md").read_text(encoding="utf-8")
    line = blocks(page, "sh")[number].replace("\\\n", " ").split()
    printed = " ".join(narrowgauge(*line[1:]).out.split())
    for part in " ".join(blocks(page, "text")[number].split()).split(" ... "):
        assert part in printed
