"""The keys of a configuration, as help and errors describe them: meaning, default and form of the value."""

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from narrowgauge.recipes.places import COMPUTE, GROUPS, PLACES
from narrowgauge.training.config.schema import Also, Section, Takes
from narrowgauge.training.config.synonyms import Key


def keys_of(sections: Mapping[str, type[Section]]) -> dict[str, Key]:
    """Every `section.key` that has a description; the places of a recipe are keys of its section."""
    keys: dict[str, Key] = {}
    for section, table in sections.items():
        for name, field in table.model_fields.items():
            if (section, name) == ("recipe", "places"):
                keys |= _place_keys()
            elif field.description:
                alias, takes = (
                    next((str(note) for note in field.metadata if isinstance(note, kind)), "")
                    for kind in (Also, Takes)
                )
                takes = takes or _takes(field.annotation)
                keys[f"{section}.{name}"] = Key(str(field.description), _default(field), takes, alias)
    return keys


def _place_keys() -> dict[str, Key]:
    keys: dict[str, Key] = {}
    for place in PLACES:
        group = place.partition(".")[0]
        if group in GROUPS:
            words = f"the cast of {', '.join(GROUPS[group])}"
            keys.setdefault(f"recipe.{group}", Key(words, "", "CAST"))
        keys[f"recipe.{place}"] = Key("the cast of this place", "", "CAST")
    keys["recipe.offload"] = Key("of master, grad, m, v: those in the host's memory (none)", "", "PLACE,...")
    keys["recipe.keep"] = Key("layers in compute instead of the recipe's own (none)", "", "NAME,...")
    keys["recipe.compute"] = Key("of matmuls and of all that is not narrow", "", "|".join(COMPUTE))
    return keys


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None or value == {} else str(value)


def _takes(kind: Any) -> str:
    """The form of a value of this type on the command line."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return "|".join(_takes(part) for part in inside if part is not NoneType)
    if origin is Annotated:
        return _takes(inside[0])
    if origin is Literal:
        return "|".join(inside)
    if origin is tuple:
        return ",".join("..." if part is Ellipsis else _takes(part) for part in inside)
    if isinstance(kind, type) and issubclass(kind, bool):
        return "true|false"
    return {int: "N", float: "X", str: "TEXT"}.get(kind, "JSON")
