"""Recipes of other tools: written for them by `write_recipe`, read from their files by `read_recipe`.

An operand must equal a cast of a tool's tables in every field. So a key that is new in recipes is refused for
every tool until its meaning there is written down. The same holds for a recipe's other facts: those that no
GEMM sees are listed here, any other must be at its default.

A tool is a module around one table of its names, which both directions use:

    VERSION   the version that the table describes
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
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import narrowgauge
from narrowgauge.exchange import megatron, modelopt, qwix, te, torchao
from narrowgauge.exchange.table import Layers, Reading, Refusal, read_file
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.describe import NONE, cast_text, changed_keys, is_wide_rule, key_value, recipe_facts
from narrowgauge.recipes.places import GEMM_PLACES, Rule
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.recipes.recipe_rules import reuses
from narrowgauge.recipes.registry import is_shipped
from narrowgauge.system.errors import UserError, unknown
from narrowgauge.system.toml_text import toml_value

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
# The facts of a recipe that a target handles, and those that affect no value.
_HANDLED = (*GEMM_PLACES, "compute", "keep", "saved", "gather", "offload")
# The comment at the top of a written file, with its lines unwrapped.
_HEADER = re.compile(
    r"# Recipe (?P<name>\S+) of narrowgauge \S+, for .*\n(# Written by: .*\n)?"
    r"# (?P<title>.*?)\.?\n# Source of the recipe: (?P<source>.*?)\.?(\n|$)"
)


class Refused(UserError):
    """A recipe that a target cannot express."""


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
    plain, layers = _narrowed(recipe, getattr(tool, "PATTERN", None))
    found = _outside_products(plain, target)
    for place in GEMM_PLACES:
        found += _cast_refusals(place, plain.casts[place], tool.choices(plain, place), target)
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
    notes, body = tool.write(*_narrowed(recipe, getattr(tool, "PATTERN", None)), blocks)
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


def _outside_products(recipe: Recipe, target: str) -> list[Refusal]:
    """What no target expresses: state, gradients on the wire, rules with casts, facts unknown here."""
    plain = recipe_facts(Recipe.from_dict({"compute": recipe.compute}))
    found = [
        Refusal(key, key, f"{key} = {value}, and {target} does not set it")
        for key, value in recipe_facts(recipe).items()
        if key not in _HANDLED and not key.startswith("rule ")
        if value not in (plain.get(key, recipe.compute), NONE)
    ]
    if recipe.saved != "input" and not reuses("wgrad.x", recipe.casts, recipe.saved):
        why = f"saved = {cast_text(recipe.saved)}, but {target} makes wgrad.x of the input itself"
        found.append(Refusal("saved", "saved", why))
    wide = [rule for rule in recipe.rules if is_wide_rule(rule, recipe)]
    if any(rule.is_for_all for rule in wide):
        found.append(Refusal("", "rule", "a [[rule]] that keeps every layer wide; leave the tool out"))
    for key in ("first_blocks", "last_blocks"):
        if sum(bool(getattr(rule, key)) for rule in wide) > 1:
            found.append(Refusal("", key, f"two rules with {key}, where {target} has one"))
    for rule in recipe.rules:
        clock = next(iter(rule.clock), "")
        why = f"[[rule]] {clock}, but a configuration of {target} holds for the whole run"
        if not clock:
            why = f"[[rule]] with other casts, but {target} gets one set of casts for all layers"
        found += [Refusal("", clock or "rule", why)] if rule not in wide else []
    return found


def _cast_refusals(place: str, c: Cast, said: Sequence[Cast], target: str) -> list[Refusal]:
    """Refusals of a cast that a target cannot express: the keys in which the nearest differs."""
    if c in said:
        return []
    if c.function:
        why = f"{c.name}, a custom function, which {target} cannot call"
        return [Refusal(place, "function", why)]

    def distance(other: Cast) -> tuple[bool, bool, int]:
        """How far a cast is: first by its element, then by what shares a scale."""
        keys = _differing(c, other)
        return "element" in keys, "block" in keys, len(keys)

    nearest = min([other for other in said if other.is_scaled == c.is_scaled] or said, key=distance)
    return [
        Refusal(place, key, f"{key} = {_shown(key, c)}, where {target} has {_shown(key, nearest)}")
        for key in _differing(c, nearest)
    ]


def _differing(c: Cast, other: Cast) -> list[str]:
    """The keys that differ, without those that follow from another one."""
    found = list(changed_keys(c, other))
    follow = {"scale": "scale_rule", "candidates": "choose", "hadamard": "signs"}
    return [n for n in found if n not in {follow.get(key) for key in found}] or ["name"]


def _shown(key: str, c: Cast) -> str:
    value = key_value(key, c.values().get(key))
    return toml_value(value) if value or value is False else "none"


def _narrowed(recipe: Recipe, start: str | None) -> tuple[Recipe, Layers]:
    """The recipe with the casts of its narrow modules for all, and which layers these and the wide ones are.

    If the recipe is wide but for its first rule, which is of modules alone, and all patterns of these begin
    with `start`, it gets the casts of this rule, and they are `only`. Rules that keep layers wide are merged
    as long as each sets different ends of the model; `_outside_products` refuses the rest.
    """
    first, *rest = recipe.rules or (Rule(places={}),)
    is_by_name = first.modules and first == Rule(places=first.casts, modules=first.modules)
    is_rest_wide = {recipe.casts[place] for place in GEMM_PLACES} == {make_cast(recipe.compute)}
    fits = start is not None and all(pattern.startswith(start) for pattern in first.modules)
    only: tuple[str, ...] = ()
    if is_by_name and is_rest_wide and fits and not is_wide_rule(first, recipe):
        recipe = replace(recipe, places={**recipe.places, **first.places}, rules=tuple(rest))
        only = first.modules
    wide = [rule for rule in recipe.rules if is_wide_rule(rule, recipe)]
    modules = tuple(dict.fromkeys(m for rule in wide for m in rule.modules))
    first_blocks, last_blocks = (
        next(filter(None, (getattr(rule, key) for rule in wide)), 0)
        for key in ("first_blocks", "last_blocks")
    )
    return recipe, Layers(only, modules, first_blocks, last_blocks)
