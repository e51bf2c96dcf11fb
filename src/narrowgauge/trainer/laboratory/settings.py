"""Configurations from the arguments of a function: sections as dictionaries, recipes in any form.

A recipe that is a dictionary or an object goes into a file next to the runs, because a run directory names
the file of its recipe, and the same line in another process has to find it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from narrowgauge.recipes import Recipe, RecipeLike, recipe, recipe_names
from narrowgauge.system.errors import UserError, unknown
from narrowgauge.system.files import make_directory, write_whole
from narrowgauge.trainer.training import Config, make_config
from narrowgauge.trainer.training.config.synonyms import SHORT

Section = str | int | float | Mapping[str, Any] | None
Values = dict[str, dict[str, Any]]


def values_of(sections: Mapping[str, Section]) -> Values:
    """Nested values from keyword arguments: `training={"steps": 6}`, or the short `steps=6` of a line.

    Raises:
        UserError: A name is not a section of a configuration, or a section has another type.
    """
    values: Values = {}
    for name, given in sections.items():
        if given is None:
            continue
        if not isinstance(given, Mapping) and (short := name.replace("_", "-")) in SHORT:
            section, _, key = SHORT[short].partition(".")
            given = {key: given}
        else:
            section = name
        if section not in Config.model_fields or name == "recipe":
            raise unknown("argument", name, [*Config.model_fields, *SHORT])
        if not isinstance(given, Mapping):
            raise UserError(
                f"{name} = {given!r}, but it is a section of the configuration; give its keys, as in "
                f"{name}={{...}}"
            )
        plain = {key: str(v) if isinstance(v, Path) else v for key, v in given.items()}
        values[section] = values.get(section, {}) | plain
    return values


def recipe_name(given: RecipeLike, file: Path) -> str:
    """The value of `recipe.name`: a shipped name, a path, or `file`, which is written.

    Raises:
        UserError: There is no such recipe; or a recipe was changed after it was read, so that no text
            describes it.
    """
    if isinstance(given, str | Path):
        recipe(given)
        return str(given)
    found = recipe(given)
    if found.name in recipe_names() and found == recipe(found.name):
        return found.name
    if Recipe.from_toml(found.text, found.name) != found:
        raise UserError(
            f"recipe {found.name!r} was changed after it was read, and a run keeps its recipe as text; give "
            "a dictionary with all its keys"
        )
    make_directory(file.parent)
    if not file.is_file() or file.read_text(encoding="utf-8") != found.text:
        write_whole(file, found.text)
    return str(file)


def short_name(given: RecipeLike) -> str:
    """The name of a recipe's arm: that of the recipe, or of its file."""
    return Path(given).stem if isinstance(given, str | Path) else recipe(given).name


def own_functions(config: Config) -> Iterator[str]:
    """The names of the casts in a configuration's recipe that are functions of this process."""
    found = config.spec.recipe
    for casts in (found.casts, *(rule.casts for rule in found.rules)):
        yield from (cast.function for cast in casts.values() if cast.function)


def config_of(given: RecipeLike | None, backend: str, sections: Mapping[str, Section]) -> Config:
    """The configuration of a plan or an advice, which no run directory keeps.

    Raises:
        UserError: A value is wrong.
    """
    values = values_of(sections)
    if backend != "auto":
        values["recipe"] = {"backend": backend}
    if given is None or isinstance(given, str | Path):
        name = {} if given is None else {"name": str(given)}
        return make_config({**values, "recipe": {**values.get("recipe", {}), **name}})
    return make_config(values).with_recipe(recipe(given))
