"""Describes recipes: a cast as a recipe writes it, the facts of a recipe, and the differences between two.

The facts are read from the fields of `Recipe` and `Cast`, so a new field appears automatically.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from narrowgauge.quantization import Cast, cast, cast_names, state_cast_names
from narrowgauge.quantization.keys import KEYS, Consumer
from narrowgauge.recipes.places import (
    ATTENTION_PLACES,
    GEMM_PLACES,
    STATE_PLACES,
    STREAM,
    WIRE_PLACES,
    Rule,
    is_wide,
)
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.system.toml_text import toml_value

WORDS = ("name", "title", "source", "text")  # descriptive fields of a recipe
_WRITTEN_APART = (*WORDS, "places", "rules")
_FIRST = ("compute", *GEMM_PLACES, *ATTENTION_PLACES, STREAM, "saved", *STATE_PLACES, *WIRE_PLACES)
NONE = "none"


def changed_keys(c: Cast, base: Cast | None = None) -> dict[str, Any]:
    """The keys in which a cast differs from another (None: from the defaults), as a recipe writes them."""
    other = c.defaults() | ({} if base is None else base.values())
    found = {key: key_value(key, value) for key, value in c.values().items() if value != other[key]}
    if base is None and found.get("scale_rule") == "rceil":
        del found["scale_rule"]  # the default of E8M0 scales
    return found


def key_value(key: str, value: Any) -> Any:
    """The value of a cast's field as a recipe writes it."""
    match key, value:
        case "element", _:
            return value.name
        case "block", None:
            return "tensor"
        case "block", (1, 0):
            return "row"
        case "block", (1, columns):
            return columns
    return list(value) if isinstance(value, tuple) else value


def cast_keys(c: Cast) -> tuple[str, dict[str, Any]]:
    """The name that a cast begins with ("" for none), and its remaining keys."""
    if c.of and not c.is_scaled:
        return c.of, {}
    if c.function:
        return c.function, {}
    if c.name in (*cast_names(), *state_cast_names()):
        return c.name, changed_keys(c, cast(c.name))
    return "", changed_keys(c)


def cast_text(c: Cast | str | None) -> str:
    """The cast in a table cell: its name, then its other keys; without a name, its keys."""
    if not isinstance(c, Cast):
        return c or NONE
    name, keys = cast_keys(c)
    words = [f"{k}={v if isinstance(v, str) else toml_value(v)}" for k, v in keys.items()]
    return " ".join([name, *words] if name else words)


def recipe_facts(recipe: Recipe) -> dict[str, str]:
    """The contents of a recipe by key: places with their casts, layers kept wide, rules."""
    own = {f.name: getattr(recipe, f.name) for f in fields(recipe) if f.name not in _WRITTEN_APART}
    found = {**own, **recipe.places}
    order = (name for name in dict.fromkeys((*_FIRST, *found)) if name in found)
    return {name: _text(found[name]) for name in order} | _rule_facts(recipe)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or NONE
    return str(value) if isinstance(value, int | float) else cast_text(value)


def is_wide_rule(rule: Rule, recipe: Recipe) -> bool:
    """Whether a rule puts every operand into the recipe's `compute`, at any time."""
    if rule.is_timed or rule.state or not all(is_wide(c, recipe.compute) for c in rule.attention.values()):
        return False
    return set(GEMM_PLACES) <= set(rule.casts) and set(rule.casts.values()) == {cast(recipe.compute)}


def _rule_facts(recipe: Recipe) -> dict[str, str]:
    facts, number = {}, 0
    for rule in recipe.rules:
        said = {key: getattr(rule, key) for key in ("modules", "first_blocks", "last_blocks")} | rule.clock
        where = ", ".join(f"{key} = {_text(value)}" for key, value in said.items() if value) or "every layer"
        if rule.keeps_state and is_wide_rule(rule, recipe):
            facts["keep"] = where.replace("modules = ", "")
            continue
        number += 1
        casts = ", ".join(f"{place} = {cast_text(c)}" for place, c in rule.places.items())
        facts[f"rule {number}"] = f"{where}: {casts}"
    return facts


def differences(a: Recipe, b: Recipe) -> list[tuple[str, str, str]]:
    """(keys, value in the first recipe, value in the second) where they differ; equal pairs are merged."""
    first, second = recipe_facts(a), recipe_facts(b)
    rows: dict[tuple[str, str], list[str]] = {}
    for key in dict.fromkeys([*first, *second]):
        said = first.get(key, NONE), second.get(key, NONE)
        if said[0] != said[1]:
            rows.setdefault(said, []).append(key)
    return [(", ".join(keys), *said) for said, keys in rows.items()]


def layout_of(cast: Cast) -> dict[str, Any]:
    """The keys of a cast that determine what its codes and scales represent."""
    return {key: cast.values()[key] for key in cast.unsupported[Consumer.SAME_LAYOUT]}


def beside(cast: Cast, layout: Mapping[str, Any]) -> list[str]:
    """The keys in which a cast's layout differs from another."""
    own = layout_of(cast)
    return [key for key in {**own, **layout} if own.get(key) != layout.get(key)]


def unlike(cast: Cast, other: Cast, known: tuple[str, ...] = ()) -> list[str]:
    """The keys in which the values of a forward pass under two casts may differ, except those in `known`."""
    may_differ = (key for key in changed_keys(cast, other) if key not in known)
    return [key for key in may_differ if Consumer.SAME_FORWARD not in KEYS[key].consumers]


def written(cast: Cast, keys: list[str]) -> str:
    """Keys of a cast with their values, as a recipe writes them."""
    return ", ".join(f"{key} = {toml_value(key_value(key, cast.values()[key]))}" for key in keys)
