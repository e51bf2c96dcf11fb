"""Recipes of other tools: written for them by `write_recipe`, read from their files by `read_recipe`.

A tool is a module around one table of its names, which both directions use:

    VERSION       the version that the table describes
    PATTERN   how patterns of modules begin that alone may be narrow; without it, none may
    choices   the casts that it has in a place: any other is refused by the keys in which it differs
    others    refusals beyond these: casts that do not go together, layers that cannot be selected
    write     the file, after notes: where its values still differ, and what its user has to do
    read      what the text of a file specifies; without it, files are not read
"""

import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import narrowgauge
from narrowgauge.exchange import megatron, modelopt, qwix, te, torchao
from narrowgauge.exchange.reading import Reading, read_file
from narrowgauge.exchange.refusal import Refusal, Refused, cast_refusals, narrowed, outside_products
from narrowgauge.recipes.places import GEMM_PLACES
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
# The comment at the top of a written file, with its lines unwrapped.
_HEADER = re.compile(
    r"# Recipe (?P<name>\S+) of narrowgauge \S+, for .*\n(# Written by: .*\n)?"
    r"# (?P<title>.*?)\.?\n# Source of the recipe: (?P<source>.*?)\.?(\n|$)"
)


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
    tool = TARGETS[target]
    plain, layers = narrowed(recipe, getattr(tool, "PATTERN", None))
    found = outside_products(plain, target)
    for place in GEMM_PLACES:
        found += cast_refusals(place, plain.casts[place], tool.choices(plain, place), target)
    return list(dict.fromkeys([*found, *tool.others(plain, layers, found)]))


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
        raise Refused(_sentence(recipe, target, found))
    tool = TARGETS[target]
    notes, body = tool.write(*narrowed(recipe, getattr(tool, "PATTERN", None)), blocks)
    if not given and is_shipped(recipe):
        given = [recipe.name]
    of_blocks = [] if blocks is None else ["--blocks", str(blocks)]
    words = shlex.join(["narrowgauge", "recipes", *given, "--to", target, *of_blocks])
    header = [
        f"Recipe {recipe.name} of narrowgauge {narrowgauge.__version__}, for {tool.VERSION}.",
        *([f"Written by: {words}"] if given else []),
        f"{recipe.title[:1].upper()}{recipe.title[1:]}.",
        f"Source of the recipe: {recipe.source}.",
        *notes,
    ]
    wrapped = (textwrap.wrap(t, 108, subsequent_indent="    ", break_long_words=False) for t in header)
    comment = "\n".join(f"# {line}".rstrip() for part in wrapped for line in part)
    return f"{comment}\n\n{body}"


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

    def toml(text: str) -> str:
        reading: Reading = tool.read(text, file, blocks)
        words = {
            "name": file.stem,
            "title": f"read from {file.name}, a file of {source}",
            "source": f"{file.name}, by the names of {tool.VERSION}",
        }
        ours = _HEADER.match(re.sub(r"\n# {5}", " ", text.partition("\n\n")[0]))
        return reading.toml(ours.groupdict() if ours else words)

    return Recipe.from_toml(read_file(file, toml), str(path))


def _sentence(recipe: Recipe, target: str, refusals: Sequence[Refusal]) -> str:
    """What a target cannot express; a reason shared by several places is listed once."""
    places: dict[str, list[str]] = {}
    for one in refusals:
        places.setdefault(one.why, []).append(one.place)
    parts = []
    for why, of_why in places.items():
        named = ", ".join(dict.fromkeys(p for p in of_why if p and not why.startswith(f"{p} =")))
        parts.append(f"{named}: {why}" if named else why)
    return (
        f"recipe {recipe.name!r} cannot be written for {target}: {'; '.join(parts)}; change these keys in a "
        "copy of the recipe, or name another target"
    )
