"""Configurations from the arguments of a function: sections as dictionaries, recipes in any form.

A recipe that is a dictionary or an object goes into a file next to the runs, because a run directory names
the file of its recipe, and the same line in another process has to find it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from narrowgauge.recipes import Recipe, RecipeLike, recipe, recipe_names
from narrowgauge.system.errors import UserError, unknown
from narrowgauge.system.files import make_directory, write_whole
from narrowgauge.trainer import training  # each name is imported when it is used
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
        if section not in training.Config.model_fields or name == "recipe":
            raise unknown("argument", name, [*training.Config.model_fields, *SHORT])
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


def own_functions(config: training.Config) -> Iterator[str]:
    """The names of the casts in a configuration's recipe that are functions of this process."""
    found = config.spec.recipe
    for casts in (found.casts, *(rule.casts for rule in found.rules)):
        yield from (cast.function for cast in casts.values() if cast.function)


def config_of(
    given: RecipeLike | None,
    backend: str,
    sections: Mapping[str, Section],
    file: Path | None = None,
    trunk: Path | None = None,
) -> training.Config:
    """The configuration of a function's arguments, over that of a run that it branches off, if there is one.

    A recipe without a name goes into `file`, if there is one.

    Raises:
        UserError: A value is wrong.
    """
    values: Values = {} if trunk is None else training.load_values(trunk / "config.toml")
    for section, table in values_of(sections).items():
        values[section] = values.get(section, {}) | table
    own = {} if backend == "auto" else {"backend": backend}
    if given is not None and (file is not None or isinstance(given, str | Path)):
        values["recipe"], given = own | {"name": recipe_name(given, file or Path())}, None
    elif own:
        values["recipe"] = values.get("recipe", {}) | own
    config = training.make_config(values)
    return config if given is None else config.with_recipe(recipe(given))
