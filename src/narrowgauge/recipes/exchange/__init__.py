"""Recipes of other tools: written for them by `write_recipe`, read from their files by `read_recipe`.

A tool is a module with these functions: `refusals` (the parts of a recipe that it cannot express), `text`,
`notes` (where its values still differ, and what its user has to do), and `read`, which reads a file. Both
directions use one table of the tool's names. `VERSION` is the version that the table describes.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.errors import UserError, unknown
from narrowgauge.recipes.exchange import megatron, modelopt, qwix, te, torchao
from narrowgauge.recipes.exchange.header import header, words
from narrowgauge.recipes.exchange.reading import Reader, read_text
from narrowgauge.recipes.exchange.refusal import Refusal, Refused, refused
from narrowgauge.recipes.exchange.toml import recipe_toml
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.recipes.registry import is_shipped

__all__ = ["SOURCES", "TARGETS", "Refusal", "Refused", "read_recipe", "refusals", "write_recipe"]


@dataclass(frozen=True, slots=True)
class Target:
    """A tool that recipes can be written for."""

    version: str
    refusals: Callable[[Recipe], list[Refusal]]
    text: Callable[[Recipe], str]
    notes: Callable[[Recipe], list[str]]
    read: Reader | None = None


TARGETS: Mapping[str, Target] = {
    "te": Target(te.VERSION, te.refusals, te.text, te.notes, te.read),
    "megatron": Target(
        megatron.VERSION, megatron.refusals, lambda r: megatron.text(r, None), megatron.notes, megatron.read
    ),
    "torchao": Target(torchao.VERSION, torchao.refusals, torchao.text, torchao.notes, torchao.read),
    "qwix": Target(qwix.VERSION, qwix.refusals, qwix.text, qwix.notes),
    "modelopt": Target(modelopt.VERSION, modelopt.refusals, modelopt.text, modelopt.notes, modelopt.read),
}
#: The tools whose files can be read.
SOURCES: Mapping[str, Reader] = {name: t.read for name, t in TARGETS.items() if t.read}


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
    key = megatron.needs_blocks(recipe) if target == "megatron" else ""
    if key and blocks is None:
        raise UserError(
            f"recipe {recipe.name!r} for megatron: keep.{key} counts the blocks of a model, but Megatron's "
            "file needs their indices; give the number of blocks with --blocks N"
        )
    body = megatron.text(recipe, blocks) if target == "megatron" else TARGETS[target].text(recipe)
    target_notes = TARGETS[target].notes(recipe)
    of_blocks = [] if blocks is None else ["--blocks", str(blocks)]
    if not given and is_shipped(recipe):
        given = [recipe.name]
    line = ["narrowgauge", "recipes", *given, "--to", target, *of_blocks] if given else []
    return header(recipe, TARGETS[target].version, shlex.join(line), target_notes) + "\n\n" + body


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
    file = Path(path)
    reading = SOURCES[source](file, blocks)
    named = words(read_text(file)) or {
        "name": file.stem,
        "title": f"read from {file.name}, a file of {source}",
        "source": f"{file.name}, by the names of {TARGETS[source].version}",
    }
    return Recipe.from_toml(recipe_toml(reading, named, "bf16"), str(path))
