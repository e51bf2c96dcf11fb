"""The comment at the top of a written file: which recipe it is, for which tool; written and read here."""

import re
import textwrap
from collections.abc import Sequence

import narrowgauge
from narrowgauge.recipes.recipe import Recipe

_FIRST = re.compile(r"Recipe (?P<name>\S+) of narrowgauge \S+, for ")
_LINE = "Written by: "
_SOURCE = "Source of the recipe: "


def header(recipe: Recipe, version: str, line: str, notes: Sequence[str]) -> str:
    """The comment of a written file for a tool and its version.

    `line` is the command line that writes the file, "" if none does; `notes` are what its user has to know.
    """
    lines = [
        f"Recipe {recipe.name} of narrowgauge {narrowgauge.__version__}, for {version}.",
        *([f"{_LINE}{line}"] if line else []),
        f"{recipe.title[:1].upper()}{recipe.title[1:]}.",
        f"{_SOURCE}{recipe.source}.",
        *notes,
    ]
    return "\n".join(f"# {line}".rstrip() for text in lines for line in _lines(text))


def words(text: str) -> dict[str, str]:
    """The name, title and source of a written file; nothing for a file without this header."""
    head = text.partition("\n\n")[0]
    lines = [line.strip() for line in re.sub(r"\n# {5}", " ", head).split("\n")]
    if not lines or not all(line.startswith("#") for line in lines):
        return {}
    said = [line.removeprefix("#").strip() for line in lines]
    first = _FIRST.match(said[0])
    title, source = [*(text for text in said[1:] if not text.startswith(_LINE)), "", ""][:2]
    if not first or not source.startswith(_SOURCE):
        return {}
    source = source.removeprefix(_SOURCE).removesuffix(".")
    return {"name": first["name"], "title": title.removesuffix("."), "source": source}


def _lines(text: str, width: int = 108) -> list[str]:
    """A text in lines; what follows the first is indented."""
    return textwrap.wrap(text, width, subsequent_indent="    ", break_long_words=False)
