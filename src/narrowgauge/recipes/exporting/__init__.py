"""A recipe as another tool wants it: `write_recipe`, and what each tool cannot say of it: `refusals`.

A target is a module with three functions of a recipe: `refusals`, `text`, and `notes` (where its numbers
differ all the same, and what its user has to do). Its `VERSION` is what was read to write it.
"""

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import narrowgauge
from narrowgauge.errors import UserError, unknown
from narrowgauge.recipes.exporting import megatron, qwix, te, torchao
from narrowgauge.recipes.exporting.refusal import Refusal, Refused, refused
from narrowgauge.recipes.recipe import Recipe

__all__ = ["TARGETS", "Refusal", "Refused", "refusals", "write_recipe"]


@dataclass(frozen=True, slots=True)
class Target:
    """A tool that recipes can be written for."""

    version: str
    refusals: Callable[[Recipe], list[Refusal]]
    text: Callable[[Recipe], str]
    notes: Callable[[Recipe], list[str]]


TARGETS: Mapping[str, Target] = {
    "te": Target(te.VERSION, te.refusals, te.text, te.notes),
    "megatron": Target(megatron.VERSION, megatron.refusals, lambda r: megatron.text(r, None), megatron.notes),
    "torchao": Target(torchao.VERSION, torchao.refusals, torchao.text, torchao.notes),
    "qwix": Target(qwix.VERSION, qwix.refusals, qwix.text, qwix.notes),
}


def refusals(recipe: Recipe, target: str) -> list[Refusal]:
    """What a target cannot express of a recipe, key by key; empty if it expresses all of it.

    Raises:
        UserError: No target has that name.
    """
    if target not in TARGETS:
        raise unknown("target", target, TARGETS)
    if not recipe.is_narrow:
        why = f"compute = {recipe.compute!r} in all three products, so {target} has nothing to quantize"
        return [Refusal("", "compute", why)]
    return list(dict.fromkeys(TARGETS[target].refusals(recipe)))


def write_recipe(recipe: Recipe, target: str, blocks: int | None = None) -> str:
    """The file of a recipe for a target, with a header that names the recipe and the version.

    Args:
        recipe: The recipe.
        target: A name of `TARGETS`.
        blocks: How many blocks the model has; Megatron's file needs it where some of the last stay wide.

    Raises:
        Refused: The target cannot say all of the recipe; the sentence names each key.
        UserError: No target has that name, or `blocks` is missing.
    """
    if found := refusals(recipe, target):
        raise refused(recipe, target, found)
    key = megatron.needs_blocks(recipe) if target == "megatron" else ""
    if key and blocks is None:
        raise UserError(
            f"recipe {recipe.name!r} for megatron: keep.{key} counts the blocks of a model, and Megatron's "
            "file wants their numbers; say how many the model has with --blocks N"
        )
    body = megatron.text(recipe, blocks) if target == "megatron" else TARGETS[target].text(recipe)
    lines = [
        f"Recipe {recipe.name} of narrowgauge {narrowgauge.__version__}, for {TARGETS[target].version}.",
        f"Written by: narrowgauge recipes {recipe.name} --to {target}"
        + (f" --blocks {blocks}" if key else ""),
        f"{recipe.title[:1].upper()}{recipe.title[1:]}.",
        f"Source of the recipe: {recipe.source}.",
        *TARGETS[target].notes(recipe),
    ]
    return "\n".join(f"# {line}".rstrip() for text in lines for line in _lines(text)) + "\n\n" + body


def _lines(text: str, width: int = 108) -> list[str]:
    """A text in lines; what follows the first is indented."""
    return textwrap.wrap(text, width, subsequent_indent="    ", break_long_words=False)
