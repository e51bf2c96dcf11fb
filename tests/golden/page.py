"""The tables of docs/recipes.md, made from the recipes that ship and from what other tools can say."""

from pathlib import Path

from narrowgauge.recipes.tables import generated, places_table, refusals_table

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def text() -> str:
    """The page with its tables made anew."""
    tables = {"places": places_table(), "refusals": refusals_table()}
    return generated(PAGE.read_text(encoding="utf-8"), tables)


def write() -> None:
    """Keeps the page."""
    PAGE.write_text(text(), encoding="utf-8")
    print(PAGE)
