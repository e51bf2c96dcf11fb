"""What pages show of plans is what their commands print, under any version of torch (`make pages`)."""

import re
from pathlib import Path

import pytest

from support.markdown import blocks
from support.plan_pages import ROWS

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.tier("thorough", keep=1)  # plans of real models
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{Path(row.page).stem} {row.options}")
def test_a_row_is_made_by_its_command(row):
    assert row.text() in (DOCS / row.page).read_text(encoding="utf-8").splitlines()


@pytest.mark.tier("thorough")  # plans of real models
@pytest.mark.parametrize("number", [0, 1])
def test_the_page_of_plans_shows_what_its_commands_print(number, narrowgauge):
    """Line breaks aside; `...` stands for what is left out."""
    page = (DOCS / "plan.md").read_text(encoding="utf-8")
    line = blocks(page, "sh")[number].replace("\\\n", " ").split()
    printed = " ".join(narrowgauge(*line[1:]).out.split())
    for part in " ".join(blocks(page, "text")[number].split()).split(" ... "):
        assert part in printed


def test_every_table_of_plans_is_among_the_rows():
    """A page that has a cell of GiB, seconds a step or tokens/s in a table is one that the commands make."""
    for page in sorted({row.page for row in ROWS}):
        text = (DOCS / page).read_text(encoding="utf-8")
        shown = re.findall(r"^\| .*(?:GiB|\d s \|).*\|$", text, re.MULTILINE)
        made = [re.split(r"\{", row.template)[0] for row in ROWS if row.page == page]
        for line in shown:
            assert any(line.startswith(start) for start in made), line
