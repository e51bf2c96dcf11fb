"""The table of docs/recipes.md that lists which recipes can be written for another tool."""

from pathlib import Path

from narrowgauge.recipes import recipe, recipe_names
from narrowgauge.recipes.exchange import TARGETS, refusals

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
BEGIN, END = "<!-- table: written -->\n", "<!-- end -->"


def written_table() -> str:
    """A Markdown row for each target: its version, and the recipes that it can express."""
    lines = ["| `--to` | version | recipes |", "| --- | --- | --- |"]
    for name, target in TARGETS.items():
        names = [*recipe_names(), *recipe_names("modelopt")]
        written = ", ".join(f"`{r}`" for r in names if not refusals(recipe(r), name))
        lines.append(f"| `{name}` | {target.version.partition(' (')[0]} | {written} |")
    return "\n".join(lines)


def text() -> str:
    """The page with its table made again."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n{written_table()}\n\n{END}{rest.partition(END)[2]}"
