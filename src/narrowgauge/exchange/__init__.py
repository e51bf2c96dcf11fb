"""Recipes of other tools: written for them by `write_recipe`, read from their files by `read_recipe`.

A tool is a module with these functions: `refusals` (the parts of a recipe that it cannot express), `text`,
`notes` (where its values still differ, and what its user has to do), and `read`, which reads a file. Both
directions use one table of the tool's names. `VERSION` is the version that the table describes.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from narrowgauge.exchange import megatron, modelopt, qwix, te, torchao
from narrowgauge.exchange.header import header, words
from narrowgauge.exchange.reading import Reading, read_text
from narrowgauge.exchange.refusal import Refusal, Refused, refused
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.recipes.registry import is_shipped
from narrowgauge.system.errors import unknown

__all__ = ["SOURCES", "TARGETS", "Refusal", "Refused", "read_recipe", "refusals", "write_recipe"]

#: The tools that recipes can be written for.
TARGETS: Mapping[str, ModuleType] = {
    "te": te,
    "megatron": megatron,
    "torchao": torchao,
    "qwix": qwix,
    "modelopt": modelopt,
}
#: The tools whose files can be read.
SOURCES = {name: tool for name, tool in TARGETS.items() if hasattr(tool, "read")}


def refusals(recipe: Recipe, target: str) -> list[Refusal]:
    """The parts of a recipe that a target cannot express, key by key; empty if there are none.

    Raises:
        UserError: No target has that name.
    """
    if target not in TARGETS:
        raise unknown("target", target, TARGETS)
    if not recipe.is_narrow:
        why = f"compute = {recipe.compute!r} in all three GEMMs, so {target} has nothing to quantize"
        return [Refusal("", "compute", why)]
    return list(dict.fromkeys(TARGETS[target].refusals(recipe)))


def write_recipe(recipe: Recipe, target: str, blocks: int | None = None, given: Sequence[str] = ()) -> str:
    """The file of a recipe for a target, with a header that names the recipe and the version.

    Args:
        recipe: The recipe.
        target: A name of `TARGETS`.
        blocks: The number of blocks of the model; Megatron's file needs it if some of the last stay wide.
        given: The words that name the recipe on the command line, such as `mine.json --from te`, for the
            header; () for a shipped recipe.

    Raises:
        Refused: The target cannot express all of the recipe; the sentence names each key.
        UserError: No target has that name, or `blocks` is missing.
    """
    if found := refusals(recipe, target):
        raise refused(recipe, target, found)
    tool = TARGETS[target]
    body = tool.text(recipe, blocks)
    of_blocks = [] if blocks is None else ["--blocks", str(blocks)]
    if not given and is_shipped(recipe):
        given = [recipe.name]
    line = ["narrowgauge", "recipes", *given, "--to", target, *of_blocks] if given else []
    return f"{header(recipe, tool.VERSION, shlex.join(line), tool.notes(recipe))}\n\n{body}"


def read_recipe(path: str | Path, source: str, blocks: int | None = None) -> Recipe:
    """The recipe that a file of another tool specifies; nothing in the file is executed.

    The recipe's `text` begins with a comment for each part of the file that the recipe does not hold, or that
    the file leaves to its user. Everything that is not low-precision is bf16.

    Args:
        path: The file.
        source: A name of `SOURCES`.
        blocks: The number of blocks of the model; Megatron's file needs it if some of the last stay wide.

    Raises:
        UserError: No source has that name, the file cannot be read, or a recipe cannot hold what it
            specifies; the sentence names it.
    """
    if source not in SOURCES:
        raise unknown("source", source, SOURCES)
    file, tool = Path(path), SOURCES[source]
    reading: Reading = tool.read(file, blocks)
    named = words(read_text(file)) or {
        "name": file.stem,
        "title": f"read from {file.name}, a file of {source}",
        "source": f"{file.name}, by the names of {tool.VERSION}",
    }
    return Recipe.from_toml(reading.toml(named, "bf16"), str(path))
